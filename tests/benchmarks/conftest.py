"""A benchmark's modules, which import each other by their plain names."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Import a module of the benchmark that the test file calls FOLDER; its plain names are given back afterwards."""
    folder: Path = request.module.FOLDER
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    before: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in _loaded(names)}
    path = list(sys.path)
    sys.path[:0] = [str(folder), str(BENCHMARKS)]
    yield importlib.import_module
    sys.path[:] = path
    for name in _loaded(names):
        del sys.modules[name]
    sys.modules.update(before)


def _loaded(names: set[str]) -> list[str]:
    """Return those modules, and what is in those packages, that are loaded."""
    return [name for name in sys.modules if name.partition(".")[0] in names]
