"""Collectives of one rank over the process group of a run or a subgroup: with a byte count, and under a watchdog."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm.collectives import Taken
from paceline.comm.shm.process_group import ShmProcessGroup
from paceline.device import CPU, Reached
from paceline.engine.spmd.process_group import ProcessGroup
from paceline.engine.spmd.watchdog import CollectiveWatchdog

# torch 2.13 has other names for them, and warns of these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Traffic:
    """The bytes that a rank has sent so far, in all its groups."""

    sent_bytes: int = 0


class Communicator:
    """Collectives of one rank.

    Args:
        group: of the run, or a subgroup.
        watchdog: waits for them.
        device: of the tensors that the backend takes.
        traffic: of the whole run, which counts the bytes of its subgroups too; None: a new count.
    """

    def __init__(
        self, group: ProcessGroup, watchdog: CollectiveWatchdog, device: str, traffic: Traffic | None = None
    ) -> None:
        self._watchdog, self.device = watchdog, torch.device(device)
        self.wait = watchdog.wait
        """Waits for a collective that has been started; see :meth:`CollectiveWatchdog.wait`."""
        self.traffic = traffic or Traffic()
        self.take_group(group)

    def take_group(self, group: ProcessGroup) -> None:
        """Communicate in a group from now on."""
        self.group = group
        self.ranks = dist.get_world_size(group.handle)
        self._shm = group.handle if isinstance(group.handle, ShmProcessGroup) else None

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
        return Communicator(group, self._watchdog, str(self.device), self.traffic)

    def again(self) -> "Communicator":
        """Create another group of the same ranks, whose messages don't wait for this one's; all call it together."""
        return Communicator(self.group.again(), self._watchdog, str(self.device), self.traffic)

    def finish(self, work: Any, tensor: Tensor, description: str) -> None:
        """Wait for a collective of a tensor, which has been started.

        The host waits for one in its own memory. For one on a device that device waits, before what it is given from
        now on; whether all ranks came to it the host finds out in :meth:`reached`.
        """
        if tensor.device != CPU and self._taken(tensor):
            work.wait()
        else:
            self.wait(work, description)

    def reached(self, description: str) -> None:
        """Wait until the device has done what it was given, if it has collectives: its numbers may be read then."""
        if self.device != CPU:
            self.wait(Reached(self.device), description)

    def give_up_group(self) -> bool:
        """Leave a group of which members are lost; return whether collectives may still write what they were given."""
        return self.group.give_up()

    def all_reduce(
        self, vectors: list[Tensor], description: str, contributions: Sequence[Tensor] | None = None
    ) -> None:
        """Replace each vector by its sum over all ranks.

        In a ring each rank sends P - 1 of P pieces to be summed, and as many sums (Patarasuk and Yuan 2009).

        Args:
            vectors: of this rank; receive the sums.
            description: of the collective, in words that follow "waited for".
            contributions: of this rank, which stay as they are; None: the vectors.
        """
        self.begin_all_reduce(vectors, description, contributions)()

    def begin_all_reduce(
        self, vectors: list[Tensor], description: str, contributions: Sequence[Tensor] | None = None
    ) -> Callable[[], None]:
        """Begin an :meth:`all_reduce`; return what waits until the vectors are the sums."""
        moved = [self._input(vector) for vector in vectors]
        # All are under way before the first wait, so that their latencies overlap.
        works = [self.start_all_reduce(*each) for each in zip(contributions or moved, moved, strict=True)]
        self.traffic.sent_bytes += sum(ring_bytes(v.nbytes, self.ranks) for v in vectors)

        def wait() -> None:
            for work in works:
                self.wait(work, description)
            for vector, result in zip(vectors, moved, strict=True):
                if result is not vector:
                    vector.copy_(result)

        return wait

    def start_all_reduce(self, vector: Tensor, out: Tensor | None = None) -> Any:
        """Start an all-reduce of a vector on the backend's device; the caller waits, and counts the bytes.

        Args:
            vector: stays as it is, if the sum goes elsewhere.
            out: receives the sum; None: the vector.
        """
        result = vector if out is None else out
        if self._shm is not None:
            return self._shm.combine(vector, result, "sum")
        if result is not vector:
            result.copy_(vector)
        return dist.all_reduce(result, group=self.group.handle, async_op=True)

    def reduced(self, x: Tensor, description: str, *, largest: bool = False) -> Tensor:
        """Return the sum of all ranks' tensors, or their elementwise maximum; ``x`` stays as it is."""
        if self._shm is not None and x.is_cpu:
            result = torch.empty(x.shape, dtype=x.dtype)
            work: Any = self._shm.combine(x, result, "max" if largest else "sum")
        else:
            place = x.device if self._taken(x) else self.device
            result = x.to(place, copy=True, memory_format=torch.contiguous_format)
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            work = dist.all_reduce(result, op, group=self.group.handle, async_op=True)
        self.finish(work, result, description)
        self.traffic.sent_bytes += ring_bytes(x.nbytes, self.ranks)
        return result.to(x.device)

    def reduce_scatter(self, rows: Tensor, own: Tensor) -> Any:
        """Start to sum all ranks' rows, one for each rank; ``own`` receives the sum of this rank's row."""
        self.traffic.sent_bytes += (self.ranks - 1) * own.nbytes
        out, given = self._output(own), self._input(rows)
        work = _reduce_scatter(out, given.view(-1), group=self.group.handle, async_op=True)
        return work if out is own else StagedWork(work, own, out)

    def reduce_scatter_parts(self, parts: Sequence[Tensor], own: Tensor | Taken) -> Any:
        """Start to sum all ranks' parts, one for each rank, which may differ in size; backend shm alone.

        Args:
            parts: of this rank, vectors; stay as they are, but for one that is ``own``.
            own: receives the sum of this rank's part, and may be that part itself; or takes it, piece by piece.
        """
        assert self._shm is not None, "other backends have parts of one size"
        self.traffic.sent_bytes += sum(part.nbytes for part in parts) - parts[self.group.handle.rank()].nbytes
        if isinstance(own, Tensor):
            return self._shm.reduce_scatter([own], [parts])
        return self._shm.reduce_scatter_taken(parts, own)

    def start_barrier(self) -> Any:
        """Start to wait until all ranks have come here; backend shm alone."""
        assert self._shm is not None, "a barrier of other backends is an all-reduce"
        return self._shm.barrier()

    def all_gather(self, rows: Tensor, own: Tensor) -> Any:
        """Start to gather all ranks' rows."""
        self.traffic.sent_bytes += (self.ranks - 1) * own.nbytes
        out, given = self._output(rows), self._input(own)
        work = _all_gather(out.view(-1), given, group=self.group.handle, async_op=True)
        return work if out is rows else StagedWork(work, rows, out)

    def broadcast(self, vector: Tensor, source: int, description: str) -> None:
        """Replace a vector by that of one rank of the group."""
        moved = self._input(vector)
        group = self.group.handle
        self.wait(dist.broadcast(moved, group=group, group_src=source, async_op=True), description)
        if moved is not vector:
            vector.copy_(moved)
        self.traffic.sent_bytes += vector.nbytes if group.rank() == source else 0

    def to_device(self, vector: Tensor) -> Tensor:
        """Return a vector on the backend's device: itself, or a copy."""
        return vector if vector.device == self.device else vector.to(self.device)

    def _taken(self, vector: Tensor) -> bool:
        """Return whether collectives take a vector where it is: every group has a backend for the host's memory."""
        return vector.device in (self.device, CPU)

    def _input(self, vector: Tensor) -> Tensor:
        """Return a vector where collectives take it: itself, or a copy."""
        return vector if self._taken(vector) else vector.to(self.device)

    def _output(self, vector: Tensor) -> Tensor:
        """Return a vector to be written, where collectives take it: itself, or new memory."""
        return vector if self._taken(vector) else torch.empty_like(vector, device=self.device)


@dataclass(frozen=True)
class StagedWork:
    """A collective on a copy of a tensor, for a backend that does not take the tensor's device.

    Args:
        work: torch's.
        target: receives the result.
        staged: has it once the collective is complete.
    """

    work: Any
    target: Tensor
    staged: Tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's."""
        done: bool = self.work.wait() if timeout is None else self.work.wait(timeout)
        self.target.copy_(self.staged)
        return done

    def is_completed(self) -> bool:
        """As torch's; the result is in the target after :meth:`wait`."""
        completed: bool = self.work.is_completed()
        return completed


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: 2·(P-1)/P of the vector.

    >>> ring_bytes(1000, 4), ring_bytes(1000, 1)
    (1500, 0)
    """
    return 2 * (ranks - 1) * nbytes // ranks
