"""What a worker measures of itself: busy time, step times, payload, memory, and spans where they are asked for."""

import time
from pathlib import Path

from paceline.core.types import Clock, ReplicaId
from paceline.engine.figures import Figures, Ledger
from paceline.engine.station import Station
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.state import State
from paceline.trace.recorder import AnyRecorder, NullRecorder

_SETTLED = 4
"""Micro-steps after which a worker holds all that it will: gradients, an optimizer's state, Δs on their way."""


class Gauge:
    """One worker's figures, kept where they outlive it.

    Args:
        ledger: keeps them.
        replica: of the worker.
        recorder: of its spans.
        step_bytes: what one Δ moves, there and back.
        per_step: micro-steps of one step.
    """

    def __init__(
        self, ledger: Ledger, replica: ReplicaId, recorder: AnyRecorder, step_bytes: int, per_step: int
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


class Gauged(Replica):
    """A replica, measured."""

    def __init__(self, inner: Replica, gauge: Gauge, station: Station, delta_bytes: int) -> None:
        self._inner, self._gauge, self._station, self._bytes = inner, gauge, station, delta_bytes

    def adopt(self, state: State) -> None:
        began = time.monotonic_ns()
        self._inner.adopt(state)
        self._gauge.spent("pull", began, self._station.attempt, self._bytes)

    def advance(self, batch: Batch, clock: int) -> float:
        return self._inner.advance(batch, clock)

    def finish(self, out: State) -> Measured:
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
