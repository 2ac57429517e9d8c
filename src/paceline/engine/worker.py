"""A worker: a user's loop around one replica, its client of the parameter server, and what it measures of itself.

What a worker measures of itself: busy time, step times, payload, memory, and spans where they are asked for.

What a user's own loop is given, and how it goes in a process of its own.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.jit import ScriptModule

from paceline.core.types import Clock, ReplicaId, Seconds
from paceline.engine.run_context import RunContext
from paceline.engine.worker_metrics import Figures, MetricsSink
from paceline.replica.base import Batch, Measured, Replica, as_batch
from paceline.replica.flat_state import FlatState
from paceline.step import Server, step
from paceline.trace.recorder import AnyRecorder, NullRecorder

LOOKS = 4
"""How often a forward pass looks whether it has been called off, at least; a hook costs some microseconds."""


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The attempt under way was called off."""


class ParameterClient(Server[FlatState, Measured], Protocol):
    """A and F, as one replica sees them, whatever carries the bytes."""

    attempt: Clock
    """Which Δ this replica is at."""

    def wait_for_grant(self) -> bool:
        """Wait for what follows the last report; whether it is to go on."""

    def cancelled(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""

    def ack_cancel(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until called off."""


def watch(module: nn.Module, station: ParameterClient) -> None:
    """Let a forward pass end between two layers when its attempt is called off."""

    def look(*_: object) -> None:
        if station.cancelled():
            raise Cancelled

    # Scripted layers take no hooks.
    layers = [m for m in module.modules() if next(m.children(), None) is None and not isinstance(m, ScriptModule)]
    for layer in layers[:: max(1, len(layers) // LOOKS)]:
        layer.register_forward_pre_hook(look)


_SETTLED = 4
"""Micro-steps after which a worker holds all that it will: gradients, an optimizer's state, Δs on their way."""


class WorkerMetrics:
    """One worker's figures, kept where they outlive it.

    Args:
        ledger: keeps them.
        replica: of the worker.
        recorder: of its spans.
        step_bytes: what one Δ moves, there and back.
        per_step: micro-steps of one step.
    """

    def __init__(
        self, ledger: MetricsSink, replica: ReplicaId, recorder: AnyRecorder, step_bytes: int, per_step: int
    ) -> None:
        self._ledger, self._replica, self._recorder = ledger, replica, recorder
        self._step_bytes, self._per_step = step_bytes, per_step
        self._micro_steps = self._waited_ns = self._payload = self._peak = 0
        self._due = 1
        self._traced = not isinstance(recorder, NullRecorder)
        self._began = self._last = time.monotonic_ns()

    def start(self) -> None:
        """The first order has come: from now on time counts."""
        self._began = self._last = time.monotonic_ns()
        self._waited_ns = 0

    def waited(self, since_ns: int, step: Clock, until_ns: int | None = None) -> None:
        """The worker has waited from ``since_ns`` until then; None: now."""
        now = time.monotonic_ns() if until_ns is None else until_ns
        self._waited_ns += now - since_ns
        if self._traced:
            self._recorder.record("wait", step, since_ns, now)

    def spent(self, action: str, since_ns: int, step: Clock, moved: int = 0) -> None:
        """The worker has done something from ``since_ns`` until now."""
        if self._traced:
            self._recorder.record(action, step, since_ns, time.monotonic_ns(), bytes=moved)  # type: ignore[arg-type]

    def stepped(self, *, pushed: bool, skipped: int = 0) -> None:
        """One more micro-step is made; ``skipped`` others were left out."""
        now = time.monotonic_ns()
        self._micro_steps += 1 + skipped
        self._payload += self._step_bytes if pushed else 0
        busy = now - self._began - self._waited_ns
        self._look()
        steps, rest = divmod(self._micro_steps, self._per_step)
        figures = Figures(steps, busy, self._payload, self._peak)
        self._ledger.measure(self._replica, figures, None if rest else (now - self._last) * 1e-9)
        self._last = self._last if rest else now

    def _look(self) -> None:
        """How much is held: after the first micro-step, and whenever twice as many are made."""
        if self._micro_steps >= self._due:
            self._peak, self._due = max(self._peak, peak_bytes()), 2 * self._micro_steps

    def close(self) -> None:
        """The worker ends. Pages that others held too would count as its own by now, if they have ended."""
        if self._micro_steps < _SETTLED:
            self._peak = max(self._peak, peak_bytes())
        figures = self._ledger.figures(self._replica)
        kept = Figures(figures.steps, figures.busy_ns, figures.payload_bytes, self._peak)
        self._ledger.measure(self._replica, kept)
        self._recorder.close()


class InstrumentedReplica(Replica):
    """A replica, measured."""

    def __init__(self, inner: Replica, gauge: WorkerMetrics, station: ParameterClient, delta_bytes: int) -> None:
        self._inner, self._gauge, self._station, self._bytes = inner, gauge, station, delta_bytes

    def adopt(self, state: FlatState) -> None:
        began = time.monotonic_ns()
        self._inner.adopt(state)
        self._gauge.spent("pull", began, self._station.attempt, self._bytes)

    def advance(self, batch: Batch, clock: int) -> float:
        return self._inner.advance(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        began = time.monotonic_ns()
        measured = self._inner.finish(out)
        self._gauge.spent("push", began, self._station.attempt, self._bytes)
        return measured


def peak_bytes() -> int:
    """The most that this process has held, as :func:`proportional_bytes` counts: what it has given back since then is
    added to what it holds now; 0 where that is not told."""
    now, most = (_told("/proc/self/status", name) for name in ("VmRSS", "VmHWM"))
    return proportional_bytes() + max(0, most - now)


def proportional_bytes() -> int:
    """This process's memory now, shared pages divided by how many share them (Pss); 0 where that is not told."""
    return _told("/proc/self/smaps_rollup", "Pss")


def _told(path: str, name: str) -> int:
    """A line of the kernel's, in bytes."""
    try:
        for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


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
        """Whether there is a further step to make; waits until that is known."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """This replica's batches, for as long as the budget lasts."""

    @abstractmethod
    def step(self, batch: Any) -> float:
        """The equation: pull A, compute Δ, push; returns the loss.

        Args:
            batch: from :meth:`batches`, or (input, target) with samples along dim 0.

        Raises:
            TrainingEnded: the budget is spent.
        """


class ClientWorker(Worker):
    """The worker of a process whose replica reaches A and F by a station.

    Args:
        setup: of the run.
        number: the replica's.
        replica: computes its Δ.
        station: the server, as it sees it.
        gauge: measures it.
        made: micro-steps that another worker has made under its name; it begins where that one has stopped.
    """

    def __init__(
        self,
        setup: RunContext,
        number: ReplicaId,
        replica: Replica,
        station: ParameterClient,
        gauge: WorkerMetrics,
        made: int = 0,
    ) -> None:
        super().__init__(number, setup.replicas)
        self._replica, self._station, self._gauge = replica, station, gauge
        self._source = setup.batches(number)
        delay = setup.job.delay
        self._delays = delay.stream(number, setup.replicas, setup.job.program.seed) if delay else None
        self._clock = self._skip = 0
        self._pass_over(made)
        self._first = made

    @property
    def going(self) -> bool:
        if not self._station.begins_delta():
            return True
        began = time.monotonic_ns()
        on = self._station.wait_for_grant()
        if self._clock == self._first:
            self._gauge.start()
        else:
            self._gauge.waited(began, self._station.attempt)
        return on

    def batches(self) -> Iterator[Batch]:
        while self.going:
            skip, self._skip = self._skip, 0
            yield next(islice(self._source, skip, None))

    def step(self, batch: Any) -> float:
        if not self.going:
            raise TrainingEnded
        clock, self._clock = self._clock, self._clock + 1
        try:
            self._slow()
            loss = step(self._replica, self._station, as_batch(batch), clock)
        except Cancelled:
            self._called_off()
            return math.nan
        self._gauge.stepped(pushed=self._station.begins_delta())
        return loss

    def run(self, loop: Callable[[Any], None] | None) -> None:
        """Live by the user's loop, or by one step a batch; then end the loader's own workers, and the figures."""
        try:
            (loop or plain_loop)(self)
        except TrainingEnded:
            pass
        finally:
            self._source.close()
            self._gauge.close()

    def _called_off(self) -> None:
        """The attempt ticks as if it had been made whole."""
        undone = self._station.ack_cancel()
        self._pass_over(undone)
        self._gauge.stepped(pushed=False, skipped=undone)

    def _pass_over(self, micro_steps: int) -> None:
        """Leave out their seeds, their delays and their batches."""
        self._clock += micro_steps
        self._skip += micro_steps
        if self._delays is not None:
            deque(islice(self._delays, micro_steps), maxlen=0)

    def _slow(self) -> None:
        if self._delays is not None and (seconds := next(self._delays)) > 0:
            began = time.monotonic_ns()
            self._station.pause(seconds)
            self._gauge.spent("delay", began, self._station.attempt)
        if self._station.cancelled():
            raise Cancelled


def plain_loop(worker: Worker) -> None:
    """What ``train`` runs on every replica."""
    for batch in worker.batches():
        worker.step(batch)
