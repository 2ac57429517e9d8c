"""The equations of stragglers, which the planner's benchmarks have: benchmarks/planner/straggler_equations.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).parents[2] / "benchmarks" / "planner" / "straggler_equations.py"


def load() -> ModuleType:
    """Import the benchmarks' module."""
    spec = importlib.util.spec_from_file_location("straggler_equations", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


equations = load()
