"""The shards of a replica as ranks of torch.distributed."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.team.traffic import Traffic, ring_bytes
from paceline.replica.tensor.shards import Shards
from paceline.trace.recorder import AnyRecorder, NullRecorder


@final
class GroupShards(Shards):
    """One shard's.

    Args:
        traffic: of the run, whose group has these shards alone; counts what is sent.
        rank: which shard this is.
    """

    def __init__(self, traffic: Traffic, rank: int) -> None:
        super().__init__(rank, traffic.ranks)
        self._traffic, self._group = traffic, traffic.group.handle
        self._others = " and ".join(str(shard) for shard in range(self.count) if shard != rank)
        self.recorder: AnyRecorder = NullRecorder()
        """Of the spans of what is sent: each lies within that of its forward or backward pass."""

    def all_reduce(self, tensor: Tensor, what: str, *, largest: bool = False) -> Tensor:
        with self._timed(ring_bytes(tensor.nbytes, self.count)):
            return self._traffic.combined(tensor, self._waited_for(what), largest=largest)

    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], what: str) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        mine = _padded(part, max(sizes))
        rows = mine.new_empty(self.count, max(sizes))
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._traffic.all_gather(rows, mine), what)
        return [row[:size].view(*shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        longest, own = max(part.numel() for part in parts), parts[self.rank]
        rows = torch.stack([_padded(part, longest) for part in parts])
        mine = rows.new_empty(longest)
        with self._timed((self.count - 1) * mine.nbytes):
            self._wait(self._traffic.reduce_scatter(rows, mine), what)
        return mine[: own.numel()].view(own.shape)

    def broadcast(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(made.nbytes if owner == self.rank else 0) as sent:
            self._wait(dist.broadcast(made, group=self._group, group_src=owner, async_op=True), what)
        self._traffic.sent_bytes += sent
        return made

    def reduce(self, tensor: Tensor, owner: int, what: str) -> Tensor:
        made = tensor.clone(memory_format=torch.contiguous_format)
        with self._timed(0 if owner == self.rank else made.nbytes) as sent:
            self._wait(dist.reduce(made, group=self._group, group_dst=owner, async_op=True), what)
        self._traffic.sent_bytes += sent
        return made

    def _wait(self, work: Any, what: str) -> None:
        self._traffic.wait(work, self._waited_for(what))

    def _waited_for(self, what: str) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        return f"{what}, from shard {self._others} for shard {self.rank} {when}"

    @contextlib.contextmanager
    def _timed(self, sent_bytes: int) -> Iterator[int]:
        began = time.monotonic_ns()
        yield sent_bytes
        self.recorder.record("all_reduce", self.step, began, time.monotonic_ns(), bytes=sent_bytes)


def _padded(part: Tensor, length: int) -> Tensor:
    """As a vector that is as long as the longest: collectives send equal parts."""
    flat = part.reshape(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_zeros(length - len(flat))])
