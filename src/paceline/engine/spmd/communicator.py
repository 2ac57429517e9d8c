"""The collectives of one rank, in a run or among some of its ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm.process_group import ShmProcessGroup as ShmGroup
from paceline.comm.shm.staging import ReduceRule
from paceline.engine.spmd.process_group import ProcessGroup
from paceline.engine.spmd.watchdog import CollectiveWatchdog

# torch 2.13 has other names for them, and warns of these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Communicator:
    """The collectives of one rank, waited for with open eyes, and the bytes that it sends in them.

    Args:
        group: of the run, or of some of its ranks.
        watchdog: waits.
        device: where the backend wants its tensors.
        whole: that of the whole run, which counts what is sent; None: this is it.
    """

    def __init__(
        self, group: ProcessGroup, watchdog: CollectiveWatchdog, device: str, whole: "Communicator | None" = None
    ) -> None:
        self.group, self._watchdog, self._device = group, watchdog, torch.device(device)
        self.ranks = dist.get_world_size(group.handle)
        self._shm = group.handle if isinstance(group.handle, ShmGroup) else None
        self._whole, self._sent_bytes = whole, 0

    @property
    def sent_bytes(self) -> int:
        """By this rank, so far, in all its groups."""
        return self._sent_bytes if self._whole is None else self._whole.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, count: int) -> None:
        if self._whole is None:
            self._sent_bytes = count
        else:
            self._whole.sent_bytes = count

    def split(self, groups: Sequence[Sequence[int]]) -> "Communicator | None":
        """That among some ranks, in which this one is; all ranks make all groups together.

        Args:
            groups: the ranks of each, every rank in one of them.

        Returns:
            None: this rank's has nobody else in it.
        """
        group = self.group.split(groups)
        if group is None or group is self.group:
            return None if group is None else self
        return Communicator(group, self._watchdog, str(self._device), self if self._whole is None else self._whole)

    def all_reduce(self, vectors: list[Tensor], what: str) -> None:
        """Replace each vector by its sum over all ranks.

        In a ring each rank sends P - 1 of P pieces to be summed, and as many sums (Patarasuk and Yuan 2009).
        """
        moved = [self.there(vector) for vector in vectors]
        works = [self.begin(vector) for vector in moved]
        for work in works:
            self.wait(work, what)
        for vector, result in zip(vectors, moved, strict=True):
            if result is not vector:
                vector.copy_(result)
        self.sent_bytes += sum(ring_bytes(v.nbytes, self.ranks) for v in vectors)

    def begin(self, vector: Tensor) -> Any:
        """Begin to replace a vector that is :meth:`there` by its sum over all ranks. To be waited for and counted."""
        if self._shm is not None:
            return self._shm.combine(vector, vector, ReduceRule.sum)
        return dist.all_reduce(vector, group=self.group.handle, async_op=True)

    def combined(self, x: Tensor, what: str, *, largest: bool = False) -> Tensor:
        """The sum of all ranks' tensors, or the largest of each element; ``x`` stays as it is."""
        if self._shm is not None and x.is_cpu:
            made = torch.empty(x.shape, dtype=x.dtype)
            self.wait(self._shm.combine(x, made, ReduceRule.max if largest else ReduceRule.sum), what)
        else:
            made = x.clone(memory_format=torch.contiguous_format)
            rule = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            self.wait(dist.all_reduce(made, rule, group=self.group.handle, async_op=True), what)
        self.sent_bytes += ring_bytes(x.nbytes, self.ranks)
        return made

    def reduce_scatter(self, rows: Tensor, mine: Tensor) -> Any:
        """Begin to sum all ranks' rows; this rank's is to be its own sum. To be waited for."""
        self.sent_bytes += (self.ranks - 1) * mine.nbytes
        return _reduce_scatter(mine, rows.view(-1), group=self.group.handle, async_op=True)

    def all_gather(self, rows: Tensor, mine: Tensor) -> Any:
        """Begin to tell all ranks this one's row. To be waited for."""
        self.sent_bytes += (self.ranks - 1) * mine.nbytes
        return _all_gather(rows.view(-1), mine, group=self.group.handle, async_op=True)

    def broadcast(self, vector: Tensor, source: int, what: str) -> None:
        """Let a vector be that of one rank on all of them."""
        moved = self.there(vector)
        self.wait(dist.broadcast(moved, source, group=self.group.handle, async_op=True), what)
        if moved is not vector:
            vector.copy_(moved)
        self.sent_bytes += vector.nbytes if dist.get_rank() == source else 0

    def wait(self, work: Any, what: str) -> None:
        """Wait for what has been begun."""
        self._watchdog.wait(work, what)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to be received, where the backend wants it."""
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def there(self, vector: Tensor) -> Tensor:
        """A vector where the backend wants it: itself, or a copy."""
        return vector if vector.device == self._device else vector.to(self._device)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """What one rank sends in a ring all-reduce: 2·(P-1)/P of the vector.

    >>> ring_bytes(1000, 4), ring_bytes(1000, 1)
    (1500, 0)
    """
    return 2 * (ranks - 1) * nbytes // ranks
