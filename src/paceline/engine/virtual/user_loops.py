"""Users' own loops in virtual time: each runs in a thread, and only one thread runs at a time.

The engine and the thread of one replica take turns::

    engine   --- go(loss of the step before) --->   thread: user's code, up to its next worker.step(batch)
    engine   <-------------- batch --------------   thread: waits inside worker.step
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import torch

from paceline.aggregation import text_of
from paceline.core.errors import InputError, WorkerError
from paceline.core.types import ReplicaId
from paceline.engine.base import Job, LoopEvent
from paceline.engine.own_loop import OwnLoop, Turns
from paceline.engine.run_context import RunContext
from paceline.engine.virtual.pending_delta import PendingDelta
from paceline.engine.worker import TrainingEnded, Worker
from paceline.replica.base import Batch, Replica
from paceline.replica.flat_state import FlatState
from paceline.replica.local_sgd import autograd_of


def refuse_loops(job: Job) -> None:
    """Raise InputError for an own loop under a policy that deals out the batches."""
    policy = job.strategy.aggregation
    if job.loop is not None and policy.portions is not None:
        raise InputError(
            f"aggregation={text_of(policy)}: in virtual time an own loop goes through its replica's stream of batches, "
            "but here no replica has one; write engine=local, or another policy"
        )


def refuse_written(replica: ReplicaId, read: FlatState, state: FlatState) -> None:
    """Raise InputError if a loop has written a parameter of its model: the A that was sent differs from what A is.

    Args:
        replica: whose loop it is.
        read: what its model is bound to, and may be shared with other replicas.
        state: A, from which that was copied since its last update.
    """
    if all(map(torch.equal, read.parameters, state.parameters)):
        return
    views = zip(read.layout.parameter_names, read.views.parameters, state.views.parameters, strict=True)
    for name, sent, kept in views:
        if not torch.equal(sent.nan_to_num(), kept.nan_to_num()):
            raise InputError(
                f"the loop of replica {replica} has written {name}, a parameter of A, which replicas only read: the "
                "next step would undo it; load weights in Program(model=…), or write checkpoint='ckpt', resume=True"
            )


class LoopWorker(Worker):
    """The worker of a user's loop, whose engine runs in another thread."""

    def __init__(
        self,
        context: RunContext,
        replica: ReplicaId,
        computing: Callable[[ReplicaId], Replica],
        source: Iterator[Batch],
        report: Callable[[LoopEvent], None],
        read_once: dict[int, tuple[ReplicaId, Any]],
    ) -> None:
        super().__init__(context, replica, report)
        self._read_once = read_once
        self._computing, self._source = computing, source
        self.attempt: PendingDelta | None = None
        """That this loop computes now."""
        self.to_loop: SimpleQueue[tuple[float, bool]] = SimpleQueue()
        """(loss of the step before, whether there is a further step)."""
        self.to_engine: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        """The next batch; or the loop's end: its error, or None where it has returned."""
        self._on: bool | None = None

    @property
    def going(self) -> bool:
        if self._on is None:
            _, self._on = self.to_loop.get()
        return self._on

    def _next_batch(self) -> Batch:
        return next(self._source)

    def _step(self, batch: Batch) -> float:
        self.to_engine.put(batch)
        loss, self._on = self.to_loop.get()
        return loss

    def _open(self) -> OwnLoop:
        autograd = autograd_of(self._computing(self.replica))
        assert autograd is not None, "in virtual time each replica has all of the model"
        return OwnLoop(self._context, self.replica, autograd, Turns(self._adopt, self._complete, self._taken_samples))

    def _adopt(self) -> None:
        """Have the model adopt the A of the attempt under way."""
        if not self.going:
            raise TrainingEnded
        attempt = self.attempt
        assert attempt is not None, "the loop has its turn for one"
        if attempt.done == 0:
            self._computing(self.replica).adopt(attempt.pull())
            attempt.adopted = True

    def _complete(self, batch: Batch) -> None:
        """Let the engine take the gradients that are there, and adopt the next A unless training ends."""
        if not self.going:
            raise TrainingEnded
        self._step(batch)
        if self.going:
            self._adopt()

    def run(self, loop: Callable[[Any], None]) -> None:
        """Run the user's loop, in its own thread."""
        ending: BaseException | None = None
        try:
            loop(self)
        except TrainingEnded:
            pass
        except BaseException as error:
            ending = error
        self.to_engine.put(ending)


class UserLoops(AbstractContextManager["UserLoops"]):
    """All loops of a run.

    Args:
        loop: the user's.
        context: of the run.
        computing: returns the replica of an id.
        source: returns the data of a replica.
        report: takes what loops report.
    """

    def __init__(
        self,
        loop: Callable[[Any], None],
        context: RunContext,
        computing: Callable[[ReplicaId], Replica],
        source: Callable[[ReplicaId], Iterator[Batch]],
        report: Callable[[LoopEvent], None],
    ) -> None:
        replicas = context.replicas
        read_once = dict[int, tuple[ReplicaId, Any]]()
        self._workers = [LoopWorker(context, r, computing, source(r), report, read_once) for r in range(replicas)]
        self._threads = [threading.Thread(target=w.run, args=(loop,), daemon=True) for w in self._workers]
        self.losses = [math.nan] * replicas
        """Loss of each loop's last step, which it receives at its next turn."""

    def dismiss(self, replica: ReplicaId) -> None:
        """Tell a loop that its training has ended, and let it run to its end."""
        thread = self._threads[replica]
        if thread.ident is None or thread.is_alive():
            self.next(replica, None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Dismiss all that still run; raise the first failure, unless another error is under way."""
        failures: list[WorkerError] = []
        for replica in (r for r, thread in enumerate(self._threads) if thread.is_alive()):
            try:
                self.dismiss(replica)
            except WorkerError as failure:
                failures.append(failure)
        if kind is None and failures:
            raise failures[0]

    def next(self, replica: ReplicaId, attempt: PendingDelta | None) -> Batch | None:
        """Let a loop run up to its next step and return its batch; None: the loop has returned.

        Args:
            replica: whose loop it is.
            attempt: that the step is of; None: there is no further step.
        """
        worker, thread = self._workers[replica], self._threads[replica]
        worker.attempt = attempt
        if thread.ident is None:
            thread.start()
        worker.to_loop.put((self.losses[replica], attempt is not None))
        answer = worker.to_engine.get()
        if isinstance(answer, Batch):
            return answer
        thread.join()  # from here on it is not alive, so it gets no further turn
        if answer is not None:
            raise WorkerError(f"the loop of replica {replica} raised {type(answer).__name__}: {answer}") from answer
        return None
