"""Point-to-point messages between the stages of a replica, over a torch.distributed process group.

A wait for a message of Gloo can't be given up and made again: one that times out closes the connection (torch 2.13). So
such waits are made on a helper thread, and the caller can check for failures meanwhile.

Shards of one stage all have the same activations, so each shard of the next stage receives from one of them::

    2 shards -> 1        1 shard -> 2        2 -> 2
    0 -> 0               0 -> 0              0 -> 0
    1                    0 -> 1              1 -> 1
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Seconds
from paceline.device import CPU, moved
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.pipeline.p2p_queue import P2P


@dataclass(frozen=True)
class Routes:
    """Ranks to which one worker sends, and from which it receives.

    Stages may have different numbers of shards: shard i of n sends to the shards i, i + n, ... of the other stage.

    Args:
        mesh: of all ranks.
        place: of this one.
    """

    mesh: Mesh
    place: Coordinate

    def to(self, column: int) -> list[int]:
        """Return the ranks of a column that receive this one's values.

        >>> Routes(Mesh(1, (1, 2)), Coordinate(0, 0)).to(1), Routes(Mesh(1, (2, 1)), Coordinate(0, 0, 1)).to(1)
        ([1, 2], [])
        >>> Routes(Mesh(1, (2, 2), (2, 1)), Coordinate(0, 0, 1)).to(2)
        [2, 3]
        """
        shards, shard = self.mesh.shards(self.place.stage), self.mesh.shard(self.place)
        ranks = self.mesh.stage_replica_ranks(self.place.replica, self.mesh.stage_replicas.at(column))
        return ranks[shard::shards]

    def source(self, column: int) -> int:
        """Return the rank of a column whose values this one receives.

        >>> Routes(Mesh(1, (1, 2)), Coordinate(0, 1, 1)).source(0), Routes(Mesh(1, (2, 1)), Coordinate(0, 1)).source(0)
        (0, 0)
        """
        ranks = self.mesh.stage_replica_ranks(self.place.replica, self.mesh.stage_replicas.at(column))
        return ranks[self.mesh.shard(self.place) % len(ranks)]


class ThreadedWait(Future[Any]):
    """A wait on the helper thread, in the form of torch's Work."""

    is_completed = Future.done
    """Returns whether it has ended, with or without an error."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raise RuntimeError if it does not end in time, or what it has raised itself."""
        try:
            self.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self.done():
                raise
            raise RuntimeError("not yet") from error
        return True


# Waits, and the futures of their results; None ends the thread.
WaitRequests: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], ThreadedWait] | None]"

# Longest wait for the helper thread to end: it ends at once unless its own wait is for a process that has died.
JOIN_S: Seconds = 2.0


class WaitThread:
    """One thread that makes one wait after the other; it ends when this object is no longer referenced.

    The end of the process waits for it: a thread that is stopped while it frees a message aborts the process
    (torch 2.13).
    """

    def __init__(self) -> None:
        self._requests: WaitRequests = queue.SimpleQueue()
        thread = threading.Thread(target=_serve_waits, args=(self._requests,), name="paceline: waits", daemon=True)
        thread.start()
        weakref.finalize(self, _end_thread, self._requests, thread)

    def begin(self, wait: Callable[[], Any]) -> ThreadedWait:
        """Have the thread make a wait, after those before it."""
        future = ThreadedWait()
        self._requests.put((wait, future))
        return future


def _end_thread(requests: WaitRequests, thread: threading.Thread) -> None:
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(JOIN_S)


def _serve_waits(requests: WaitRequests) -> None:
    while (request := requests.get()) is not None:
        wait, future = request
        try:
            future.set_result(wait())
        except BaseException as error:
            future.set_exception(error)
        del request, wait, future  # they hold a message, which is to be freed now


# Backends on which a wait for a message that has timed out may be made again.
WAITS_AGAIN = ("nccl", "shm")


@final
class ProcessGroupP2P(P2P):
    """Messages of one worker.

    Args:
        communicator: of the whole run; counts the bytes.
        routes: to the workers of this replica, as ranks of the run.
        device: of this worker, on which messages are when they have been received.
        backward: for messages to stages before this one, and from those after it; None: as the others.
    """

    def __init__(
        self,
        communicator: Communicator,
        routes: Routes,
        device: torch.device = CPU,
        backward: Communicator | None = None,
    ) -> None:
        self._communicator, self._device = communicator, device
        self._forward, self._backward = communicator.group.handle, (backward or communicator).group.handle
        replicas = routes.mesh.stage_replicas
        columns, self._column = range(len(replicas)), replicas.number(routes.mesh.stage_replica(routes.place))
        self._destinations, self._sources = list(map(routes.to, columns)), list(map(routes.source, columns))
        self._wait_thread = None if communicator.group.backend in WAITS_AGAIN else WaitThread()
        self._polls = communicator.group.backend == "shm"
        self._sends: deque[_Send] = deque()

    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        while self._sends and all(work.is_completed() for work in self._sends[0].works):
            self._sends.popleft()
        if tensor.numel():
            sent = self._communicator.to_device(tensor)
            ranks = self._destinations[destination]
            group = self._backward if destination < self._column else self._forward
            works = [group.send([_real(sent)], rank, 0) for rank in ranks]  # dist.isend without its checks
            self._sends.append(_Send(works, sent, description))
            self._communicator.traffic.sent_bytes += tensor.nbytes * len(ranks)

    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> Callable[[], Tensor]:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self._communicator.device)
        group = self._backward if source > self._column else self._forward
        work = group.recv([_real(buffer)], self._sources[source], 0) if buffer.numel() else None

        def received() -> Tensor:
            if work is not None:
                self._wait(work, buffer, description)
            return moved(buffer, self._device)

        return received

    def wait_sends(self, newest: int = 0) -> None:
        while len(self._sends) > newest:
            oldest = self._sends.popleft()
            for work in oldest.works:
                self._wait(work, oldest.tensor, oldest.description)

    def reached(self, description: str) -> None:
        self._communicator.reached(description)

    def _wait(self, work: Any, tensor: Tensor, description: str) -> None:
        """Wait for a message; for one on a device that device does."""
        if self._polls and work.is_completed() and work.is_success():
            return  # without the watchdog: most messages have arrived by now
        awaited = work if self._wait_thread is None else self._wait_thread.begin(work.wait)
        self._communicator.finish(awaited, tensor, description)


def _real(tensor: Tensor) -> Tensor:
    """Return a view that backends take: they know no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _Send(NamedTuple):
    """A message on its way; the tensor must not change until it has been sent.

    Args:
        works: one for each destination.
    """

    works: list[Any]
    tensor: Tensor
    description: str
