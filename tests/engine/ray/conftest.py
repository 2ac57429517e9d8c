"""One Ray for all of this folder's tests: starting it and its actors costs some ten seconds, a run a few tenths."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import Run, train
from paceline.engine.local.engine import LocalEngine
from paceline.engine.ray.engine import RayEngine

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

SHARED = RayEngine()

QUIET = {"progress": False, "evaluate_every": 10**6}
"""Only the start and the end are scored: the scorer uses cores that nobody else wants, and tests have busy ones."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No test of another folder has a Ray beside it."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        SHARED.close()


@pytest.fixture
def engine() -> RayEngine:
    """Shared by tests that leave it running; it starts with the first run."""
    return SHARED


@pytest.fixture(scope="module")
def local_engine() -> Iterator[LocalEngine]:
    """For runs that go on elsewhere."""
    with LocalEngine() as carrier:
        yield carrier


@pytest.fixture
def no_ray() -> None:
    """This process is connected to no Ray."""
    SHARED.close()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for passing files, with a path that Ray's sockets can have."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def on_ray(engine: RayEngine) -> Callable[..., Run]:
    """``train`` on it."""

    def run(program: Any, strategy: Any, **settings: Any) -> Run:
        return train(program, strategy, engine=engine, **QUIET | settings)

    return run
