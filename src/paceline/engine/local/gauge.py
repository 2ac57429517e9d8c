"""What a worker measures of itself: busy time, step times, payload, memory, and spans where they are asked for."""

import os
import time
from pathlib import Path

from paceline.core.types import Clock, ReplicaId
from paceline.engine.local.board import Board, Figures
from paceline.trace.recorder import AnyRecorder


class Gauge:
    """One worker's figures, kept on the board so that they outlive it.

    Args:
        board: of the run.
        replica: of the worker.
        recorder: of its spans.
        step_bytes: what one Δ moves, there and back.
    """

    def __init__(self, board: Board, replica: ReplicaId, recorder: AnyRecorder, step_bytes: int) -> None:
        self._board, self._replica, self._recorder, self._step_bytes = board, replica, recorder, step_bytes
        self._steps = self._waited_ns = self._payload = self._peak = 0
        self._began = self._last = time.monotonic_ns()

    def start(self) -> None:
        """The first order has come: from now on time counts."""
        self._began = self._last = time.monotonic_ns()
        self._waited_ns = 0

    def waited(self, since_ns: int, step: Clock) -> None:
        """The worker has waited from ``since_ns`` until now."""
        now = time.monotonic_ns()
        self._waited_ns += now - since_ns
        self._recorder.record("wait", step, since_ns, now)

    def spent(self, action: str, since_ns: int, step: Clock, moved: int = 0) -> None:
        """The worker has done something from ``since_ns`` until now."""
        self._recorder.record(action, step, since_ns, time.monotonic_ns(), bytes=moved)  # type: ignore[arg-type]

    def stepped(self, *, pushed: bool) -> None:
        """One more micro-step is made."""
        now = time.monotonic_ns()
        self._steps += 1
        self._payload += self._step_bytes if pushed else 0
        if self._steps == 1:
            self._peak = proportional_bytes()
        busy = now - self._began - self._waited_ns
        figures = Figures(self._steps, busy, self._payload, self._peak)
        self._board.measure(self._replica, figures, (now - self._last) * 1e-9)
        self._last = now

    def close(self) -> None:
        """The worker ends."""
        self._peak = max(self._peak, proportional_bytes())
        figures = self._board.figures(self._replica)
        kept = Figures(figures.steps, figures.busy_ns, figures.payload_bytes, self._peak)
        self._board.measure(self._replica, kept)
        self._recorder.close()


def proportional_bytes() -> int:
    """This process's memory now, shared pages divided by how many share them (Pss); 0 where that is not told."""
    try:
        for line in Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
