"""Point-to-point messages between the stages of a replica, over a torch.distributed process group.

Waits that can't be given up and made again, made in a thread of their own, so that who waits can look around.

Gloo's messages are such: a wait for one that times out closes the connection (torch 2.13).

Values between the stages of a replica, as messages of torch.distributed.
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
from paceline.engine.spmd.communicator import Communicator
from paceline.replica.pipeline.base import P2P, PendingRecv


@dataclass(frozen=True)
class Routes:
    """One worker's.

    Args:
        mesh: of all ranks.
        place: of this one.
    """

    mesh: Mesh
    place: Coordinate

    def to(self, column: int) -> list[int]:
        """The ranks of a column that take this one's values.

        >>> Routes(Mesh(1, (1, 2)), Coordinate(0, 0)).to(1), Routes(Mesh(1, (2, 1)), Coordinate(0, 0, 1)).to(1)
        ([1, 2], [])
        >>> Routes(Mesh(1, (2, 2), (2, 1)), Coordinate(0, 0, 1)).to(2)
        [2, 3]
        """
        mine, shard = self.mesh.shards(self.place.stage), self.mesh.shard(self.place)
        return [rank for other, rank in enumerate(self._ranks(column)) if other % mine == shard]

    def source(self, column: int) -> int:
        """The rank of a column whose values this one takes.

        >>> Routes(Mesh(1, (1, 2)), Coordinate(0, 1, 1)).source(0), Routes(Mesh(1, (2, 1)), Coordinate(0, 1)).source(0)
        (0, 0)
        """
        ranks = self._ranks(column)
        return ranks[self.mesh.shard(self.place) % len(ranks)]

    def _ranks(self, column: int) -> list[int]:
        return self.mesh.stage_replica_ranks(self.place.replica, self.mesh.stage_replicas.at(column))


Asked: TypeAlias = "queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"
"""Waits, and who wants to know what came of them; None: no more."""


LEAVE_S: Seconds = 2.0
"""How long the thread may take to end: at once, but where it waits for somebody who has died."""


class WaitThread:
    """One thread, which makes one wait after the other; it ends when nobody holds this any more.

    The end of the process waits for it: a thread that is stopped while it lets go of a message aborts the process
    (torch 2.13).
    """

    def __init__(self) -> None:
        self._asked: Asked = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._asked,), name="paceline: waits", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._asked, thread)

    def begin(self, wait: Callable[[], Any]) -> "Waiting":
        """Have it made."""
        future: Future[Any] = Future()
        self._asked.put((wait, future))
        return Waiting(future)


def _end(asked: Asked, thread: threading.Thread) -> None:
    asked.put(None)
    if thread is not threading.current_thread():
        thread.join(LEAVE_S)


def _serve(asked: Asked) -> None:
    while (wanted := asked.get()) is not None:
        _make(*wanted)
        del wanted  # it holds a message, which is to be let go of now


def _make(wait: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(wait())
    except BaseException as error:
        future.set_exception(error)


class Waiting:
    """A wait under way, in the form of torch's Work."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError when it is not over in time, and what it has raised itself."""
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            if self._future.done():
                raise
            raise RuntimeError("not yet") from error
        return True


IN_SLICES = ("nccl", "shm")
"""Backends on which a wait for a message may be given up and made again."""


@final
class ProcessGroupP2P(P2P):
    """One worker's.

    Args:
        communicator: of the run; counts what is sent.
        routes: to the workers of this replica, in the run's group, which has all ranks.
    """

    def __init__(self, communicator: Communicator, routes: Routes) -> None:
        self._communicator, self._group, self._routes = communicator, communicator.group.handle, routes
        self._aside = None if communicator.group.backend in IN_SLICES else WaitThread()
        self._tells = communicator.group.backend == "shm"
        self._sent: deque[_Sent] = deque()

    def isend(self, tensor: Tensor, destination: int, description: str) -> None:
        while self._sent and all(work.is_completed() for work in self._sent[0].works):
            self._sent.popleft()
        if tensor.numel():
            moved = self._communicator.there(tensor)
            ranks = self._routes.to(destination)
            works = [self._group.send([_real(moved)], rank, 0) for rank in ranks]  # dist.isend, but for its checks
            self._sent.append(_Sent(works, moved, description))
            self._communicator.sent_bytes += tensor.nbytes * len(ranks)

    def irecv(self, shape: Sequence[int], dtype: torch.dtype, source: int, description: str) -> PendingRecv:
        buffer = self._communicator.empty(shape, dtype)
        work = self._group.recv([_real(buffer)], self._routes.source(source), 0) if buffer.numel() else None
        return _Message(self, work, buffer, description)

    def wait_sends(self, newest: int = 0) -> None:
        while len(self._sent) > newest:
            oldest = self._sent.popleft()
            for work in oldest.works:
                self.wait(work, oldest.what)

    def wait(self, work: Any, what: str) -> None:
        """Wait for a message."""
        if self._tells and work.is_completed() and work.is_success():
            return
        self._communicator.wait(work if self._aside is None else self._aside.begin(work.wait), what)


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
class _Message(PendingRecv):
    def __init__(self, wire: ProcessGroupP2P, work: Any, buffer: Tensor, what: str) -> None:
        self._wire, self._work, self._buffer, self._what = wire, work, buffer, what

    def wait(self) -> Tensor:
        if self._work is not None:
            self._wire.wait(self._work, self._what)
            self._work = None
        return self._buffer
