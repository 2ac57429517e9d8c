"""One fork server for the whole folder, and pipes that are read within a bound."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer

sys.path.append(str(Path(__file__).parent))  # handed over to the children, which import comm_entries by it
from comm_entries import Pipe


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Give children ``pipe.fd``."""
    pipe = Pipe()
    yield pipe
    os.close(pipe.end)
    os.close(pipe.fd)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Shared by tests that leave it running."""
    fork_server = ForkServer.start(["torch", "comm_entries", "comm_tensor_entries"])
    yield fork_server
    fork_server.close()


@pytest.fixture
def bare() -> Iterator[ForkServer]:
    """One that a test may break; without torch, so it starts quickly."""
    fork_server = ForkServer.start([])
    yield fork_server
    fork_server.close()
