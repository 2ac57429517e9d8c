"""Ranks as torchrun starts them, forked from a process that has imported already what each would need seconds for.

They find the words that torchrun leaves in the environment, and a file in place of its store. Tests of what torchrun
itself does start it (``distributed_cases.torchrun``).
"""

import contextlib
import faulthandler
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import FileStore

from paceline.comm.fork_server import ForkServer, ProcessHandle
from paceline.comm.wakeup import Poller
from paceline.engine.spmd import process_group

WITHIN_S = 240.0
WELL = "exit code 0"


class Play(Protocol):
    """Lets so many ranks run a script to its end, with the folder and the words as its arguments."""

    def __call__(self, script: Path, *words: str, size: int, folder: Path) -> None: ...


def play(fork_server: ForkServer, script: Path, *words: str, size: int, folder: Path) -> None:
    """As :class:`Play` says.

    Raises:
        AssertionError: a rank failed, which ends the others, or was not done in time; with what they printed.
    """
    arguments = [str(script), str(folder), *words]
    about = {"size": size, "store": str(folder / f"store {script.stem}"), "arguments": arguments}
    children = [fork_server.spawn("tests.ranks:rank", about | {"rank": rank}) for rank in range(size)]
    try:
        ill = _first_ill(fork_server, children)
        said = (f"rank {rank}: {_said(folder, rank).read_text() or 'nothing'}" for rank in range(size))
        assert ill is None, "\n".join([ill, "they said:", *said])
    finally:
        for child in children:
            fork_server.forget(child)


def _first_ill(fork_server: ForkServer, children: list[ProcessHandle]) -> str | None:
    """Which one failed, as soon as one has, or who are not done in time; None: all ended well."""
    deadline, waiter = time.monotonic() + WITHIN_S, Poller[ProcessHandle]()
    with contextlib.closing(waiter):
        for child in children:
            waiter.add(child.pidfd, child)
        living = dict(zip(children, range(len(children)), strict=True))
        while living and (left_s := deadline - time.monotonic()) > 0:
            for child in waiter.wait(left_s):
                waiter.remove(child.pidfd)
                number, status = living.pop(child), fork_server.status(child.pid)
                if status != WELL:
                    return f"rank {number}: {status}"
    return f"ranks {list(living.values())} are not done after {WITHIN_S:g} s" if living else None


def rank(args: dict[str, Any], _fds: list[int]) -> None:
    """One of them: what a child of the fork_server does."""
    number, size = str(args["rank"]), str(args["size"])
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    process_group._job_store = FileStore(args["store"], args["size"])
    torch.set_num_threads(1)
    sys.argv = args["arguments"]
    with _said(Path(sys.argv[1]), args["rank"]).open("w") as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
        faulthandler.enable()
        faulthandler.dump_traceback_later(0.8 * WITHIN_S)  # who hangs says where
        runpy.run_path(sys.argv[0], run_name="__main__")


def _said(folder: Path, number: int) -> Path:
    return folder / f"said.{number}"
