"""Values between the stages of a replica, as messages of torch.distributed."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from paceline.engine.distributed.aside import Aside
from paceline.engine.distributed.exchange import Traffic
from paceline.replica.pipeline.wire import Arrival, Wire

IN_SLICES = ("nccl", "shm")
"""Backends on which a wait for a message may be given up and made again."""


@final
class GroupWire(Wire):
    """One worker's.

    Args:
        traffic: of the run; counts what is sent.
        ranks: of the workers of this replica, in the run's group, which has all ranks.
    """

    def __init__(self, traffic: Traffic, ranks: Sequence[int]) -> None:
        self._traffic, self._group, self._ranks = traffic, traffic.group.handle, ranks
        self._aside = None if traffic.group.backend in IN_SLICES else Aside()
        self._tells = traffic.group.backend == "shm"
        self._sent: deque[_Sent] = deque()

    def send(self, tensor: Tensor, to: int, what: str) -> None:
        while self._sent and self._sent[0].work.is_completed():
            self._sent.popleft()
        if tensor.numel():
            moved = self._traffic.there(tensor)
            work = self._group.send([_real(moved)], self._ranks[to], 0)  # dist.isend, but for its checks
            self._sent.append(_Sent(work, moved, what))
            self._traffic.sent_bytes += tensor.nbytes

    def expect(self, shape: Sequence[int], dtype: torch.dtype, source: int, what: str) -> Arrival:
        buffer = self._traffic.empty(shape, dtype)
        work = self._group.recv([_real(buffer)], self._ranks[source], 0) if buffer.numel() else None
        return _Message(self, work, buffer, what)

    def settle(self, but: int = 0) -> None:
        while len(self._sent) > but:
            oldest = self._sent.popleft()
            self.wait(oldest.work, oldest.what)

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

    work: Any
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
