"""Equations that the planner's benchmarks have, and tests compare with: modules of benchmarks/planner."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"


def load(name: str) -> ModuleType:
    """Import a module of the benchmarks that needs no other of them."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


equations = load("straggler_equations")
product_fit = load("product_fit")
