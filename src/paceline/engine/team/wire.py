"""Values between the stages of a replica, as messages of torch.distributed."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.engine.team.aside import Aside
from paceline.engine.team.routes import Routes
from paceline.engine.team.traffic import Traffic
from paceline.replica.pipeline.wire import Arrival, Wire

IN_SLICES = ("nccl", "shm")
"""Backends on which a wait for a message may be given up and made again."""


@final
class GroupWire(Wire):
    """One worker's.

    Args:
        traffic: of the run; counts what is sent.
        routes: to the workers of this replica, in the run's group, which has all ranks.
    """

    def __init__(self, traffic: Traffic, routes: Routes) -> None:
        self._traffic, self._group, self._routes = traffic, traffic.group.handle, routes
        self._aside = None if traffic.group.backend in IN_SLICES else Aside()
        self._tells = traffic.group.backend == "shm"
        self._sent: deque[_Sent] = deque()

    def send(self, tensor: Tensor, to: int, what: str) -> None:
        while self._sent and all(work.is_completed() for work in self._sent[0].works):
            self._sent.popleft()
        if tensor.numel():
            moved = self._traffic.there(tensor)
            ranks = self._routes.to(to)
            works = [self._group.send([_real(moved)], rank, 0) for rank in ranks]  # dist.isend, but for its checks
            self._sent.append(_Sent(works, moved, what))
            self._traffic.sent_bytes += tensor.nbytes * len(ranks)

    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        buffer = self._traffic.empty(shape, dtype)
        work = self._group.recv([_real(buffer)], self._routes.source(source), 0) if buffer.numel() else None
        return _Message(self, work, buffer, what)

    def settle(self, but: int = 0) -> None:
        while len(self._sent) > but:
            oldest = self._sent.popleft()
            for work in oldest.works:
                self.wait(work, oldest.what)

    def wait(self, work: Any, what: str) -> None:
        """Wait for a message."""
        if self._tells and work.is_completed() and work.is_success():
            return
        self._traffic.wait(work if self._aside is None else self._aside.begin(work.wait), what)


def _real(tensor: Tensor) -> Tensor:
    """As backends take it; the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Sent(NamedTuple):
    """On its way; the tensor must stay as it is until it has gone."""

    works: list[Any]
    """To each who takes it."""
    tensor: Tensor
    what: str


@final
class _Message(Arrival):
    def __init__(self, wire: GroupWire, work: Any, buffer: Tensor, what: str) -> None:
        self._wire, self._work, self._buffer, self._what = wire, work, buffer, what

    def take(self) -> Tensor:
        if self._work is not None:
            self._wire.wait(self._work, self._what)
            self._work = None
        return self._buffer
