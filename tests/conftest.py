"""What all tests share: scripts that they start as processes are no modules of tests, one thread, and a fork server."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported, and for all processes that tests start: two threads for products this small mostly wait for
# each other, and where others want the core they spin meanwhile, which made tests take four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

from paceline.comm.fork_server import ForkServer
from paceline.engine.local.engine import GROUPS, SPMD, WITH_OPTIMIZERS, LocalEngine
from paceline.engine.spmd.launcher import PRELOAD
from tests import ranks, thorough

collect_ignore_glob = ["*_script.py"]

settings.register_profile("paceline", deadline=None, derandomize=True)  # no test depends on speed, or on chance
settings.load_profile("paceline")

PRELOADED = (*dict.fromkeys((*WITH_OPTIMIZERS, *SPMD, *GROUPS, *PRELOAD)), "tests.preloaded")
"""For runs of all kinds."""


def preloaded(config: pytest.Config) -> tuple[str, ...]:
    """Return what the tests' fork server imports: with ``--device`` the engines, without models of other packages."""
    return PRELOADED if config.getoption("--device") == "sim" else PRELOADED[:-1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of tests/accelerator run on a device of this host."""
    parser.addoption("--device", default="sim", help="sim, the simulated accelerator; a type of device; or auto")


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left to `make test-all`, and order the files."""
    seen = set[str]()
    for item in items:
        if thorough.is_thorough(item.nodeid, seen):
            item.add_marker(pytest.mark.thorough)
    # Files of this folder first: single tests of them run for minutes, and last of all would leave a worker idle.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For tests of what leaves their number as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    """Shared by tests that leave it running: a run costs a tenth of a second, what its workers import some six."""
    with LocalEngine() as carrier:
        carrier._fork_server_with(preloaded(request.config))
        yield carrier


@pytest.fixture(scope="session")
def session_fork_server(engine: LocalEngine, request: pytest.FixtureRequest) -> ForkServer:
    """The engine's."""
    return engine._fork_server_with(preloaded(request.config))


@pytest.fixture
def fork_server(session_fork_server: ForkServer) -> Iterator[ForkServer]:
    """The engine's; what a test leaves there when it fails ends with it, and fails no other."""
    yield session_fork_server
    for child in list(session_fork_server._children.values()):
        session_fork_server.forget(child)


@pytest.fixture(scope="session")
def play(session_fork_server: ForkServer) -> ranks.Play:
    """Starts ranks."""
    return functools.partial(ranks.play, session_fork_server)
