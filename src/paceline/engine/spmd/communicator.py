"""Collectives of one rank over the process group of a run or a subgroup, under the watchdog, with a byte count."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm.process_group import ShmProcessGroup
from paceline.comm.shm.staging import ReduceRule
from paceline.engine.spmd.process_group import ProcessGroup
from paceline.engine.spmd.watchdog import CollectiveWatchdog

# torch 2.13 has other names for them, and warns of these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Communicator:
    """Collectives of one rank.

    Args:
        group: of the run, or a subgroup.
        watchdog: waits for them.
        device: of the tensors that the backend takes.
        whole: communicator of the whole run, which counts the bytes; None: it is this one.
    """

    def __init__(
        self, group: ProcessGroup, watchdog: CollectiveWatchdog, device: str, whole: "Communicator | None" = None
    ) -> None:
        self.group, self._watchdog, self._device = group, watchdog, torch.device(device)
        self.ranks = dist.get_world_size(group.handle)
        self._shm = group.handle if isinstance(group.handle, ShmProcessGroup) else None
        self._whole, self._sent_bytes = whole, 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far, in all its groups."""
        return self._sent_bytes if self._whole is None else self._whole.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, count: int) -> None:
        if self._whole is None:
            self._sent_bytes = count
        else:
            self._whole.sent_bytes = count

    def split(self, groups: Sequence[Sequence[int]]) -> "Communicator | None":
        """Create subgroups, and return this rank's communicator; all ranks call it together.

        Args:
            groups: ranks of each subgroup; every rank is in one of them.

        Returns:
            None: this rank's subgroup has no other rank.
        """
        group = self.group.split(groups)
        if group is None or group is self.group:
            return None if group is None else self
        return Communicator(group, self._watchdog, str(self._device), self if self._whole is None else self._whole)

    def all_reduce(self, vectors: list[Tensor], description: str) -> None:
        """Replace each vector by its sum over all ranks.

        In a ring each rank sends P - 1 of P pieces to be summed, and as many sums (Patarasuk and Yuan 2009).
        """
        moved = [self.to_device(vector) for vector in vectors]
        works = [self.start_all_reduce(vector) for vector in moved]
        for work in works:
            self._watchdog.wait(work, description)
        for vector, result in zip(vectors, moved, strict=True):
            if result is not vector:
                vector.copy_(result)
        self.sent_bytes += sum(ring_bytes(v.nbytes, self.ranks) for v in vectors)

    def start_all_reduce(self, vector: Tensor) -> Any:
        """Start an all-reduce in place of a vector on the backend's device; the caller waits, and counts the bytes."""
        if self._shm is not None:
            return self._shm.combine(vector, vector, ReduceRule.sum)
        return dist.all_reduce(vector, group=self.group.handle, async_op=True)

    def reduced(self, x: Tensor, description: str, *, largest: bool = False) -> Tensor:
        """Return the sum of all ranks' tensors, or their elementwise maximum; ``x`` stays as it is."""
        if self._shm is not None and x.is_cpu:
            result = torch.empty(x.shape, dtype=x.dtype)
            work: Any = self._shm.combine(x, result, ReduceRule.max if largest else ReduceRule.sum)
        else:
            result = x.clone(memory_format=torch.contiguous_format)
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            work = dist.all_reduce(result, op, group=self.group.handle, async_op=True)
        self._watchdog.wait(work, description)
        self.sent_bytes += ring_bytes(x.nbytes, self.ranks)
        return result

    def reduce_scatter(self, rows: Tensor, own: Tensor) -> Any:
        """Start to sum all ranks' rows, one for each rank; ``own`` receives the sum of this rank's row."""
        self.sent_bytes += (self.ranks - 1) * own.nbytes
        return _reduce_scatter(own, rows.view(-1), group=self.group.handle, async_op=True)

    def all_gather(self, rows: Tensor, own: Tensor) -> Any:
        """Start to gather all ranks' rows."""
        self.sent_bytes += (self.ranks - 1) * own.nbytes
        return _all_gather(rows.view(-1), own, group=self.group.handle, async_op=True)

    def broadcast(self, vector: Tensor, source: int, description: str) -> None:
        """Replace a vector by that of one rank."""
        moved = self.to_device(vector)
        self._watchdog.wait(dist.broadcast(moved, source, group=self.group.handle, async_op=True), description)
        if moved is not vector:
            vector.copy_(moved)
        self.sent_bytes += vector.nbytes if dist.get_rank() == source else 0

    def wait(self, work: Any, description: str) -> None:
        """Wait for a collective that has been started."""
        self._watchdog.wait(work, description)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor to receive into, on the backend's device."""
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def to_device(self, vector: Tensor) -> Tensor:
        """Return a vector on the backend's device: itself, or a copy."""
        return vector if vector.device == self._device else vector.to(self._device)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: 2·(P-1)/P of the vector.

    >>> ring_bytes(1000, 4), ring_bytes(1000, 1)
    (1500, 0)
    """
    return 2 * (ranks - 1) * nbytes // ranks
