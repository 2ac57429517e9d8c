"""Users' own loops in virtual time: each runs in a thread, and only one thread runs at a time.

The engine and the thread of one replica take turns::

    engine   --- go(loss of the step before) --->   thread: user's code, up to its next worker.step(batch)
    engine   <-------------- batch --------------   thread: waits inside worker.step
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from paceline.core.errors import WorkerError
from paceline.core.types import ReplicaId
from paceline.engine.worker import TrainingEnded, Worker
from paceline.replica.base import Batch, as_batch


@dataclass(frozen=True, slots=True)
class _Go:
    loss: float
    on: bool


class _Finished:
    """Message: the loop has returned."""


class LoopWorker(Worker):
    """The worker of a user's loop, whose engine runs in another thread."""

    def __init__(self, replica: ReplicaId, replicas: int, source: Iterator[Batch]) -> None:
        super().__init__(replica, replicas)
        self._source = source
        self.to_loop: SimpleQueue[_Go] = SimpleQueue()
        self.to_engine: SimpleQueue[Batch | _Finished | BaseException] = SimpleQueue()
        self._on: bool | None = None

    @property
    def going(self) -> bool:
        if self._on is None:
            self._on = self.to_loop.get().on
        return self._on

    def batches(self) -> Iterator[Batch]:
        while self.going:
            yield next(self._source)

    def step(self, batch: Any) -> float:
        if not self.going:
            raise TrainingEnded
        self.to_engine.put(as_batch(batch))
        answer = self.to_loop.get()
        self._on = answer.on
        return answer.loss


class UserLoops:
    """All loops of a run.

    Args:
        loop: the user's.
        replicas: P.
        source: returns the data of a replica.
    """

    def __init__(
        self, loop: Callable[[Any], None], replicas: int, source: Callable[[ReplicaId], Iterator[Batch]]
    ) -> None:
        self._workers = [LoopWorker(r, replicas, source(r)) for r in range(replicas)]
        self._losses = [float("nan")] * replicas
        self._threads = [threading.Thread(target=_run, args=(loop, w), daemon=True) for w in self._workers]
        self._new, self._live = set(range(replicas)), set[ReplicaId]()

    def next(self, replica: ReplicaId) -> Batch | None:
        """Let a loop run up to its next step and return its batch; None: the loop has returned."""
        return self._take_turn(replica, on=True)

    def took(self, replica: ReplicaId, loss: float) -> None:
        """Note that step's loss; the loop receives it at its next turn."""
        self._losses[replica] = loss

    def dismiss(self, replica: ReplicaId) -> None:
        """Tell a loop that its training has ended, and let it run to its end."""
        if replica in self._new or replica in self._live:
            self._take_turn(replica, on=False)

    def __enter__(self) -> "UserLoops":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Dismiss all that still run; raise the first failure, unless another error is under way."""
        failures: list[WorkerError] = []
        for replica in sorted(self._live):
            try:
                self.dismiss(replica)
            except WorkerError as failure:
                failures.append(failure)
        if kind is None and failures:
            raise failures[0]

    def _take_turn(self, replica: ReplicaId, *, on: bool) -> Batch | None:
        worker, thread = self._workers[replica], self._threads[replica]
        if replica in self._new:
            self._new.remove(replica)
            self._live.add(replica)
            thread.start()
        worker.to_loop.put(_Go(self._losses[replica], on))
        answer = worker.to_engine.get()
        if isinstance(answer, Batch):
            return answer
        self._live.discard(replica)
        thread.join()
        if isinstance(answer, BaseException):
            raise WorkerError(f"the loop of replica {replica} raised {type(answer).__name__}: {answer}") from answer
        return None


def _run(loop: Callable[[Any], None], worker: LoopWorker) -> None:
    ending: _Finished | BaseException = _Finished()
    try:
        loop(worker)
    except TrainingEnded:
        pass
    except BaseException as error:
        ending = error
    worker.to_engine.put(ending)
