"""The Smooth Switch benchmark's modules, which import each other by their plain names."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smooth_switch"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Import a module of the benchmark; its plain names are given back afterwards."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    before: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)
