"""One fork server for these tests, that has imported what is built on torch.distributed, and ``ranks`` it forks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer

sys.path.append(str(Path(__file__).parent))  # handed over to the children, which import scenes by it
from shm_ranks import Ranks

PRELOADED = ["drop_in_scenes", "paceline.comm.hierarchical", "shm_ranks"]


@pytest.fixture(scope="session")
def rank_fork_server() -> Iterator[ForkServer]:
    """Forks the ranks of all jobs."""
    fork_server = ForkServer.start(PRELOADED)
    yield fork_server
    fork_server.close()


@pytest.fixture
def ranks(rank_fork_server: ForkServer, tmp_path: Path) -> Ranks:
    """Plays scenes: ``ranks(size, "module:scene", **args)`` is what each rank returned."""
    return Ranks(rank_fork_server, tmp_path)
