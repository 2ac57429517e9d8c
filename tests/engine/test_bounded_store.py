"""The job's store with a bound: a server that answers no more, and what is left of the request then."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.core.errors import WorkerError
from paceline.engine.spmd.bounded_store import BoundedStore
from tests.engine.local.commands import eventually

SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Process and port of a store's server."""
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def stopped(stat: str) -> bool:
    """Return whether a thread has stopped: it may run on for a moment after the signal."""
    return stat.rpartition(")")[2].split()[0] == "T"


def test_a_request_that_is_not_answered_leaves_no_thread(server: tuple[int, int]) -> None:
    pid, port = server
    # "localhost" may be one of two addresses, and the socket may be of either family
    store = BoundedStore(PrefixStore("run", TCPStore("localhost", port)), 20.0)
    store.set("key", "1")
    assert store.found("key") == 1
    assert store.found("other") is None
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(stopped(stat.read_text()) for stat in Path(f"/proc/{pid}/task").glob("*/stat")))
    silent = BoundedStore(store.store, 0.2)
    with pytest.raises(WorkerError, match="the job's store did not answer within"):
        silent.get("key")
    # it would abort the process, were it to return while the interpreter ends
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline-the job's store")]
    with pytest.raises(WorkerError, match="given up"):
        silent.get("key")
