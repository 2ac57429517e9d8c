"""A worker: a user's loop around one replica, its client of the parameter server, and its own measurements.

One step of a worker::

    worker.step --> step.step:   client.pull -> replica.adopt -> replica.advance -> replica.finish -> client.push
                                                WorkerMetrics: busy time, step times, payload, memory, spans
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.jit import ScriptModule

from paceline.core.errors import InputError
from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.batch_dispatcher import NO_BATCHES
from paceline.engine.run_context import RunContext
from paceline.engine.worker_metrics import STEP_TIMES, Figures, MetricsSink, peak_bytes
from paceline.replica.base import Batch, Measured, Replica, as_batch
from paceline.replica.flat_state import FlatState
from paceline.step import Server, step
from paceline.trace.recorder import AnyRecorder, NullRecorder

# How many layers of a forward pass check for cancellation, at least; a hook costs some microseconds.
CANCEL_CHECKS = 4

# Micro-steps after which a worker has allocated all it will: gradients, an optimizer's state, Δs on their way.
_SETTLED = 4


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The attempt under way was cancelled."""


class ParameterClient(Server[FlatState, Measured], Protocol):
    """A and F as one replica sees them, whatever transports the bytes."""

    attempt: Clock
    """Number of the Δ that this replica is at."""

    def batch(self) -> tuple[ReplicaId, int]:
        """Return stream and number of the batch of the next micro-step, once that is granted."""

    def wait_for_grant(self) -> bool:
        """Wait for the decision on the last Δ; return whether the replica is to go on."""

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""

    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; return how many micro-steps after this one are left out."""

    def pause(self, seconds: Seconds) -> None:
        """Wait for an injected delay, or until cancelled."""

    def taken_back(self) -> int:
        """Return how many of the last micro-steps are to be made again, on other batches, since the last call."""


class GrantedClient(ABC):
    """The half of a client whose Δs are granted one by one: it counts the micro-steps of the Δ under way.

    Args:
        attempt: number of the last Δ that another worker has computed in this replica's place; 0: none.
    """

    def __init__(self, attempt: Clock = 0) -> None:
        self.attempt = attempt
        """The Δ that this replica computes, counted from 1."""
        self._batches, self._done = NO_BATCHES, 0
        """Batches of the Δ under way, a micro-step on each, and how many of them are done."""
        self._under_way = False

    @abstractmethod
    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""

    @final
    def to_break_off(self) -> bool:
        """Return whether a forward pass is to end: not where it belongs to no attempt, as while a model is checked."""
        return self._under_way and self.cancelled()

    @final
    def begins_delta(self) -> bool:
        return self._done == 0

    @final
    def batch(self) -> tuple[ReplicaId, int]:
        """Return stream and number of the batch of the next micro-step, once that is granted."""
        return self._batches.stream, self._batches.first + self._done

    @final
    def ends_delta(self) -> bool:
        self._done += 1
        if self._done < self._batches.size:
            return False
        self._done = 0
        return True

    @final
    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; returns how many micro-steps after this one it skips."""
        skipped = max(0, self._batches.size - self._done - 1)
        self._done = 0
        self.push(Measured(math.nan, 0, True), cancelled=True)
        return skipped

    def taken_back(self) -> int:
        """Return how many of the last micro-steps are to be made again: none, where each is granted before."""
        return 0

    @abstractmethod
    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        """Report the end of the attempt, after Δ was written unless it was cancelled."""


def check_in_forward(module: nn.Module, client: GrantedClient) -> None:
    """Let a forward pass end between two layers when its attempt is cancelled; a compiled one is in one piece."""

    def check(*_: object) -> None:
        if not torch.compiler.is_compiling() and client.to_break_off():
            raise Cancelled

    # Scripted layers take no hooks.
    layers = [m for m in module.modules() if next(m.children(), None) is None and not isinstance(m, ScriptModule)]
    for layer in layers[:: max(1, len(layers) // CANCEL_CHECKS)]:
        layer.register_forward_pre_hook(check)


class WorkerMetrics:
    """Measurements of one worker, kept in a sink that outlives it.

    Args:
        sink: keeps them.
        replica: of the worker.
        recorder: of its spans.
        step_bytes: bytes that one Δ moves, both ways.
        per_step: micro-steps of one step.
    """

    def __init__(
        self, sink: MetricsSink, replica: ReplicaId, recorder: AnyRecorder, step_bytes: int, per_step: int
    ) -> None:
        self._sink, self._replica, self._recorder = sink, replica, recorder
        self._step_bytes, self._per_step = step_bytes, per_step
        self._micro_steps = self._waited_ns = self._payload = self._peak = 0
        self._next_peak_check = 1
        self._before = sink.figures(replica)
        """Of processes that did this worker's work before it, and have died."""
        self._traced = not isinstance(recorder, NullRecorder)
        self._began = self._last = time.monotonic_ns()

    def start(self) -> None:
        """Start the clock: the first grant has come."""
        self._began = self._last = time.monotonic_ns()
        self._waited_ns = 0

    def waited(self, since_ns: int, step: Clock, until_ns: int | None = None) -> None:
        """Count time from ``since_ns`` to ``until_ns`` (None: now) as waiting."""
        now = time.monotonic_ns() if until_ns is None else until_ns
        self._waited_ns += now - since_ns
        if self._traced:
            self._recorder.record("wait", step, since_ns, now)

    def spent(self, action: str, since_ns: int, step: Clock, moved: int = 0) -> None:
        """Record what the worker did from ``since_ns`` until now."""
        if self._traced:
            self._recorder.record(action, step, since_ns, time.monotonic_ns(), bytes=moved)  # type: ignore[arg-type]

    def stepped(self, *, pushed: bool, skipped: int = 0) -> None:
        """Count one more micro-step, and ``skipped`` others that were left out."""
        now = time.monotonic_ns()
        self._micro_steps += 1 + skipped
        self._payload += self._step_bytes if pushed else 0
        busy = now - self._began - self._waited_ns
        if self._micro_steps >= self._next_peak_check:  # reading it takes milliseconds, so ever more rarely
            self._peak, self._next_peak_check = max(self._peak, peak_bytes()), 2 * self._micro_steps
        steps, rest = divmod(self._micro_steps, self._per_step)
        before = self._before
        peak = max(before.peak_memory_bytes, self._peak)
        figures = Figures(before.steps + steps, before.busy_ns + busy, before.payload_bytes + self._payload, peak)
        self._sink.measure(self._replica, figures, None if rest else (now - self._last) * 1e-9)
        self._last = self._last if rest else now

    def close(self) -> None:
        """Store the peak memory and the spans at the end of the worker."""
        # Later on, pages shared with others would count as this worker's own once those have ended.
        if self._micro_steps < _SETTLED:
            self._peak = max(self._peak, peak_bytes())
        figures = self._sink.figures(self._replica)
        peak = max(self._before.peak_memory_bytes, self._peak)
        self._sink.measure(self._replica, figures._replace(peak_memory_bytes=peak))
        self._recorder.close()


@dataclass
class InMemorySink:
    """Metrics sink of one worker, in its own memory."""

    newest: Figures = field(default=Figures(0, 0, 0, 0))
    step_times: deque[Seconds] = field(default_factory=lambda: deque(maxlen=STEP_TIMES))

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: Seconds | None = None) -> None:
        """Store the figures so far, and the time of one more step."""
        del replica
        self.newest = figures
        if step_time_s is not None:
            self.step_times.append(step_time_s)

    def figures(self, replica: ReplicaId) -> Figures:
        """Return the figures so far."""
        del replica
        return self.newest


class InstrumentedReplica(Replica):
    """A replica whose pulls and pushes are recorded."""

    def __init__(self, inner: Replica, metrics: WorkerMetrics, client: ParameterClient, delta_bytes: int) -> None:
        self._inner, self._metrics, self._client, self._bytes = inner, metrics, client, delta_bytes

    def adopt(self, state: FlatState) -> None:
        began = time.monotonic_ns()
        self._inner.adopt(state)
        self._metrics.spent("pull", began, self._client.attempt, self._bytes)

    def advance(self, batch: Batch, clock: int) -> float:
        return self._inner.advance(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        began = time.monotonic_ns()
        measured = self._inner.finish(out)
        self._metrics.spent("push", began, self._client.attempt, self._bytes)
        return measured


class TrainingEnded(Exception):  # noqa: N818 (an end, not an error)
    """Raised by ``worker.step`` after the last step; a loop may let it pass, it ends the loop and nothing else."""


class Worker(ABC):
    """One replica, as its loop sees it.

    >>> def loop(worker):
    ...     for batch in worker.batches():
    ...         loss = worker.step(batch)
    """

    def __init__(self, replica: ReplicaId, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas

    @property
    @abstractmethod
    def going(self) -> bool:
        """Return whether there is a further step to make; waits until that is decided."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Yield this replica's batches, for as long as the budget lasts."""

    @abstractmethod
    def step(self, batch: Any) -> float:
        """Make one step of the equation: pull A, compute Δ, push it.

        Args:
            batch: from :meth:`batches`, or (input, target) with samples along dim 0.

        Returns:
            The mean loss over the batch; NaN where the step was cancelled.

        Raises:
            TrainingEnded: the budget is spent.
        """


class ClientWorker(Worker):
    """The worker of a process whose replica reaches A and F through a client.

    Args:
        context: of the run.
        number: of the replica.
        replica: computes its Δ.
        client: of the parameter server.
        metrics: of this worker.
        first: micro-steps that another worker has made in this replica's place since the run began or was resumed.
    """

    def __init__(
        self,
        context: RunContext,
        number: ReplicaId,
        replica: Replica,
        client: ParameterClient,
        metrics: WorkerMetrics,
        first: int = 0,
    ) -> None:
        super().__init__(number, context.replicas)
        self._replica, self._client, self._metrics = replica, client, metrics
        self._source = context.batches()
        self._shared = context.shares_stream
        self._ahead = self._left_out = 0
        """How many more batches the loop has been given than it has made steps: in all, and since its last step."""
        delay = context.job.delay
        self._delays = delay.stream(number, context.replicas, context.job.program.seed) if delay else None
        self._clock = 0
        self._skip_micro_steps(context.positions[number].clock + first)
        self._first = self._clock

    @property
    def going(self) -> bool:
        if not self._client.begins_delta():
            return True
        began = time.monotonic_ns()
        granted = self._client.wait_for_grant()
        if self._clock == self._first:
            self._metrics.start()
        else:
            self._metrics.waited(began, self._client.attempt)
        return granted

    def batches(self) -> Iterator[Batch]:
        while self.going:
            stream, number = self._client.batch()
            if self._left_out and self._shared:
                raise InputError(
                    "the loop made no step on a batch, but replicas that come and go, or compute portions, share their "
                    "batches, so each needs one; write worker.step(batch) for every batch, or a fixed number of "
                    "replicas under another policy"
                )
            # A loop that leaves batches out, or makes several steps on one, goes through its own stream all the same.
            own = stream == self.replica and not self._shared
            number += self._ahead if own else self._left_out
            self._ahead, self._left_out = self._ahead + 1, self._left_out + 1
            yield self._source.at(stream, number)

    def step(self, batch: Any) -> float:
        if not self.going:
            raise TrainingEnded
        client, clock = self._client, self._clock
        self._clock += 1
        self._ahead, self._left_out = self._ahead - 1, 0
        try:
            if self._delays is not None and (seconds := next(self._delays)) > 0:
                began = time.monotonic_ns()
                client.pause(seconds)
                self._metrics.spent("delay", began, client.attempt)
            if client.cancelled():
                raise Cancelled
            loss = step(self._replica, client, batch if isinstance(batch, Batch) else as_batch(batch), clock)
        except Cancelled:
            # Clock, seeds, delays and batches move on as if the attempt had been completed.
            undone = client.ack_cancel()
            self._skip_micro_steps(undone)
            self._metrics.stepped(pushed=False, skipped=undone)
            return math.nan
        if again := client.taken_back():
            self._clock -= again
        else:
            self._metrics.stepped(pushed=client.begins_delta())
        return loss

    def run(self, loop: Callable[[Any], None] | None) -> None:
        """Run the user's loop, or one step a batch; then end the loader's own workers and store the measurements."""
        try:
            if loop is not None:
                loop(self)
            else:
                for batch in self.batches():
                    self.step(batch)
        except TrainingEnded:
            pass
        finally:
            self._source.close()
            self._metrics.close()

    def _skip_micro_steps(self, count: int) -> None:
        self._clock += count
        if self._delays is not None:
            deque(islice(self._delays, count), maxlen=0)
