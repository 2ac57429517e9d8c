"""One fork server for these tests, that has imported what is built on torch.distributed, and ``ranks`` it forks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer

sys.path.append(str(Path(__file__).parent))  # handed over to the children, which import scenes by it
from shm_ranks import Ranks

PRELOADED = ["drop_in_scenes", "paceline.comm.backends", "shm_ranks"]


@pytest.fixture(scope="session")
def rank_nursery() -> Iterator[ForkServer]:
    """Forks the ranks of all jobs."""
    nursery = ForkServer.start(PRELOADED)
    yield nursery
    nursery.close()


@pytest.fixture
def ranks(rank_nursery: ForkServer, tmp_path: Path) -> Ranks:
    """Plays scenes: ``ranks(size, "module:scene", **args)`` is what each rank returned."""
    return Ranks(rank_nursery, tmp_path)
