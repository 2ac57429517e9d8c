"""What all tests share: scripts that they start as processes are no modules of tests, one thread, and a fork server."""

import functools
import gc
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for all processes that tests start: two threads for products this small mostly wait for
# each other, and where others want the core they spin meanwhile, which made tests take four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs that share out the cores say themselves how many they take: their threads sleep while they wait.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import settings

from paceline.comm.fork_server import ForkServer
from paceline.engine.local.engine import GROUPS, SPMD, WITH_OPTIMIZERS, LocalEngine
from paceline.engine.spmd.launcher import PRELOAD
from tests import ranks, thorough

# Scripts, and modules for other processes, whose imports would cost each worker seconds; none has a doctest.
collect_ignore_glob = ["*_script.py", "*_cases.py", "*_scenes.py"]

settings.register_profile("paceline", deadline=None, derandomize=True)  # no test depends on speed, or on chance
settings.load_profile("paceline")

PRELOADED = (*dict.fromkeys((*WITH_OPTIMIZERS, *SPMD, *GROUPS, *PRELOAD)), "tests.preloaded")
"""For runs of all kinds."""

RAY = "tests/engine/ray/"
"""Where tests share a Ray."""

SHARED = (RAY, "tests/replica/pipeline/")
"""Folders whose files share what takes long to start or to make: a Ray, and all models of the zoo as graphs."""


def preloaded(config: pytest.Config) -> tuple[str, ...]:
    """Return what the tests' fork server imports: with ``--device`` the engines, without models of other packages."""
    return PRELOADED if config.getoption("--device") == "sim" else PRELOADED[:-1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of tests/accelerator run on a device of this host, and a part of the thorough tests."""
    parser.addoption("--device", default="sim", help="sim, the simulated accelerator; a type of device; or auto")
    parser.addoption("--shard", default="1/1", help="K/N: of the thorough tests, the K-th of N shards alone")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail for a test file that can't be imported.

    Doctests are looked for first, and skip it, as they should a module of a package that is not installed; then nobody
    looks for its tests (pytest 9.2).
    """
    report = yield
    if report.skipped and report.nodeid.startswith("tests/") and "unable to import module" in str(report.longrepr):
        report.outcome = "failed"
    return report


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left to `make test-all`, leave other shards of that out, and order the files."""
    text = config.getoption("--shard")
    shard = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = map(int, shard.groups()) if shard else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard={text}: write K/N, the K-th of N shards, 2/4 for instance")
    seen, others = set[str](), set[pytest.Item]()
    for item in items:
        if thorough.is_thorough(item.nodeid, seen):
            item.add_marker(pytest.mark.thorough)
            if thorough.shard_of(item.nodeid, count) != number:
                others.add(item)
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
    # What takes minutes first, which last of all would leave a worker idle: Ray's tests, and files of this folder.
    items.sort(key=lambda item: (not item.nodeid.startswith(RAY), item.path.parent != Path(__file__).parent))


def pytest_collection_finish() -> None:
    """Have no garbage collection look at modules and tests, which stay: that took a twentieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files of some folders to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (folder for folder in SHARED if nodeid.startswith(folder))
            return next(shared, super()._split_scope(nodeid))

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


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
def engines(engine: LocalEngine) -> dict[str, str | LocalEngine]:
    """What ``engine=`` is for tests of one process and of several, by name."""
    return {"virtual": "virtual", "local": engine}


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
