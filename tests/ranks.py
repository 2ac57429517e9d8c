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

from paceline.comm.bell import Waiter
from paceline.comm.nursery import Child, Nursery
from paceline.engine.team import group

WITHIN_S = 240.0
WELL = "exit code 0"


class Play(Protocol):
    """Lets so many ranks run a script to its end, with the folder and the words as its arguments."""

    def __call__(self, script: Path, *words: str, size: int, folder: Path) -> None: ...


def play(nursery: Nursery, script: Path, *words: str, size: int, folder: Path) -> None:
    """As :class:`Play` says.

    Raises:
        AssertionError: a rank failed, which ends the others, or was not done in time; with what they printed.
    """
    arguments = [str(script), str(folder), *words]
    about = {"size": size, "store": str(folder / f"store {script.stem}"), "arguments": arguments}
    children = [nursery.spawn("tests.ranks:rank", about | {"rank": rank}) for rank in range(size)]
    try:
        assert _all_well(nursery, children), "\n".join(_said(folder, rank).read_text() for rank in range(size))
    finally:
        for child in children:
            nursery.forget(child)


def _all_well(nursery: Nursery, children: list[Child]) -> bool:
    """Whether all end well in time; False as soon as one does not."""
    deadline, waiter = time.monotonic() + WITHIN_S, Waiter[Child]()
    with contextlib.closing(waiter):
        for child in children:
            waiter.add(child.pidfd, child)
        living = set(children)
        while living and (left_s := deadline - time.monotonic()) > 0:
            for child in waiter.wait(left_s):
                waiter.remove(child.pidfd)
                living.remove(child)
                if nursery.status(child.pid) != WELL:
                    return False
    return not living


def rank(args: dict[str, Any], _fds: list[int]) -> None:
    """One of them: what a child of the nursery does."""
    number, size = str(args["rank"]), str(args["size"])
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    group._met = FileStore(args["store"], args["size"])
    torch.set_num_threads(1)
    sys.argv = args["arguments"]
    with _said(Path(sys.argv[1]), args["rank"]).open("w") as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
        faulthandler.dump_traceback_later(0.8 * WITHIN_S)  # who hangs says where
        runpy.run_path(sys.argv[0], run_name="__main__")


def _said(folder: Path, number: int) -> Path:
    return folder / f"said.{number}"
