"""Ranks of a job on a torch.distributed backend: what each was told to do, and what became of it.

A scene is a function ``(rank, size, **args) -> JSON`` in a module beside this one. All ranks play the same one, each in
a process of its own, with the default group made and one thread::

    def sums(rank: int, size: int, elements: int) -> float:
        x = torch.full((elements,), float(rank))
        dist.all_reduce(x)
        return x.sum().item()

    def test_sums(ranks: Ranks) -> None:
        assert ranks(3, "scenes:sums", elements=5) == [15.0] * 3
"""

import importlib
import json
import os
import selectors
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline.comm
from paceline.comm.fork_server import ForkServer, ProcessHandle

GROUP_TIMEOUT_S = 30.0
"""Of the default group, where a test says no other."""

BOUND_S = 100.0
"""No scene plays longer."""


class Ranks:
    """Starts the ranks of a job, one job after the other.

    Args:
        fork_server: forks them.
        folder: an empty one, for their stores.
    """

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server, self._folder, self._jobs = fork_server, folder, 0

    def __call__(
        self,
        size: int,
        scene: str,
        *,
        backend: str = "shm",
        timeout_s: float = GROUP_TIMEOUT_S,
        dying: Sequence[int] = (),
        **args: Any,
    ) -> list[Any]:
        """Play a scene to its end.

        Args:
            size: how many ranks.
            scene: "module:function".
            backend: of the default group.
            timeout_s: of the default group.
            dying: ranks that say nothing, because the scene ends them.
            args: for the scene, what JSON can carry.

        Returns:
            What each rank returned; None where it was to die.

        Raises:
            AssertionError: a rank raised, with its traceback; or said nothing within the bound.
        """
        self._jobs += 1
        about = {
            "scene": scene,
            "backend": backend,
            "size": size,
            "timeout_s": timeout_s,
            "store": str(self._folder / f"store{self._jobs}"),
            "args": args,
        }
        children: list[ProcessHandle] = []
        ends: list[int] = []
        try:
            for rank in range(size):
                end, fd = os.pipe()
                ends.append(end)
                try:
                    children.append(self._fork_server.spawn("shm_ranks:play", about | {"rank": rank}, [fd]))
                finally:
                    os.close(fd)
            said = _hear(ends)
            _refuse(said, children, self._fork_server, dying)
        finally:
            for child in children:
                self._fork_server.forget(child)
            for end in ends:
                os.close(end)
        return [None if rank in dying else json.loads(words)["returned"] for rank, words in enumerate(said)]


def _hear(ends: Sequence[int]) -> list[bytes]:
    """All that each rank says, until all have ended or the time is up."""
    said = [b""] * len(ends)
    deadline = time.monotonic() + BOUND_S
    with selectors.DefaultSelector() as open_ends:
        for rank, end in enumerate(ends):
            open_ends.register(end, selectors.EVENT_READ, rank)
        while open_ends.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in open_ends.select(left_s):
                words = os.read(key.fd, 1 << 16)
                said[key.data] += words
                if not words:
                    open_ends.unregister(key.fd)
    return said


def _refuse(
    said: Sequence[bytes], children: Sequence[ProcessHandle], fork_server: ForkServer, dying: Sequence[int]
) -> None:
    """Fail where a rank did, or said nothing."""
    wrong = []
    for rank, (words, child) in enumerate(zip(said, children, strict=True)):
        if not words.endswith(b"\n"):
            if rank not in dying:
                wrong.append(f"rank {rank} said nothing: {fork_server.status(child.pid) or 'it still runs'}")
        elif "raised" in (told := json.loads(words)):
            wrong.append(f"rank {rank} raised\n{told['raised']}")
        elif rank in dying:
            wrong.append(f"rank {rank} was to die and returned {told['returned']}")
    assert not wrong, "\n".join(wrong)


def play(args: dict[str, Any], fds: list[int]) -> None:
    """One rank's part: what a child of the fork_server does."""
    try:
        told = {"returned": _play(**args)}
    except BaseException:
        told = {"raised": traceback.format_exc()}
    with open(fds[0], "w") as out:
        out.write(json.dumps(told) + "\n")


def _play(scene: str, backend: str, rank: int, size: int, timeout_s: float, store: str, args: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    paceline.comm.register()
    module, _, name = scene.partition(":")
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    returned = function(rank, size, **args)
    if dist.is_initialized():  # a scene may have destroyed it
        dist.destroy_process_group()
    return returned
