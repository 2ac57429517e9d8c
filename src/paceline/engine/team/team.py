"""The ranks of one run together: what they tell each other beside gradients, and how a failure reaches all."""

import contextlib
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.failure import failure, worker_failed
from paceline.engine.team.group import opened
from paceline.engine.team.lookout import Lookout
from paceline.engine.team.notices import Notices
from paceline.engine.team.peers import Peers
from paceline.engine.team.traffic import Traffic
from paceline.engine.team.world import World

LINGER_S: Seconds = 5.0
"""How long rank 0, where it keeps the job's store, stays for the others to read why the run ended."""


class Team:
    """What one rank has of the others; alone, nobody.

    Args:
        world: which rank this is.
        peers: who they are.
        traffic: collectives.
        notices: what is said outside them.
    """

    def __init__(self, world: World, peers: Peers, traffic: Traffic | None, notices: Notices | None) -> None:
        self.world, self.peers, self.traffic, self.notices = world, peers, traffic, notices

    def gather(self, value: Any, what: str) -> list[Any]:
        """What each rank says, in their order."""
        if self.traffic is None:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([len(mine)]), [1] * self.world.size, what)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = self._gather(padded, [len(padded)] * self.world.size, what)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def judge(self, error: BaseException) -> BaseException:
        """What all ranks raise, where this one has met an error."""
        dead = None if isinstance(error, PacelineError) else self.peers.gone()
        if dead is not None:  # a collective of somebody else's broke
            told: PacelineError = WorkerError(f"{dead} ended while {self.peers.me} was at work with it: {error}")
        else:
            told = error if isinstance(error, PacelineError) else WorkerError(_told(self.world.rank, error))
        if self.notices is not None:
            told = self._agreed(self.notices, told)
        return told if isinstance(error, Exception) else error

    def _agreed(self, notices: Notices, told: PacelineError) -> PacelineError:
        try:
            verdict = notices.judge(told)
            notices.read(self.world.rank)
            if self.world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                notices.await_readers(LINGER_S)
        except RuntimeError:  # the store has gone with who kept it
            return told
        return verdict

    def _gather(self, mine: torch.Tensor, sizes: list[int], what: str) -> list[torch.Tensor]:
        assert self.traffic is not None, "nobody is there"
        found = [torch.empty(size, dtype=mine.dtype) for size in sizes]
        self.traffic.wait(dist.all_gather(found, mine, group=self.traffic.group.handle, async_op=True), what)
        return found


@contextlib.contextmanager
def assembled(world: World, backend: str, device: str, timeout_s: Seconds, *, watched: bool) -> Iterator[Team]:
    """The team of one run, while that lasts; what any rank raises inside, all raise.

    Args:
        world: which rank this is.
        backend: moves the bytes.
        device: where this rank computes.
        timeout_s: the longest wait.
        watched: whether all collectives are waited for by :class:`Lookout`; else the backend itself must bound them.
    """
    with opened(world, backend, timeout_s) as group, contextlib.ExitStack() as closing:
        peers = Peers(world, group)
        closing.callback(peers.close)
        if group is None:
            team = Team(world, peers, None, None)
        else:
            if backend != "nccl" and watched:
                group.wait_for_ever()
            notices = Notices(group.store, world.rank, world.size)
            lookout = Lookout(notices, peers, timeout_s, backend)
            traffic = Traffic(group, lookout, device if backend == "nccl" else "cpu")
            team = Team(world, peers, traffic, notices)
        try:
            yield team
        except BaseException as error:
            said = team.judge(error)
            if said is error:
                raise
            raise said from error


def _told(rank: int, error: BaseException) -> str:
    return worker_failed(json.loads(failure(rank, error)))
