"""Checkpoints of a run: when one is due, what is in it, and what becomes of it.

::

    engine   ... event ... event | take a snapshot, copy it | event ... event ... event ...
    writer                                                  | hash, write, fsync, rename |

An engine calls :meth:`Checkpointer.save_if_due` between two events. What it holds then is copied, and written by
another process while training goes on. A disk that is full, slow or read-only costs a line on stderr and the next try,
never the run.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.writer import CheckpointWriter, SaveResult
from paceline.core.types import Seconds
from paceline.engine.loop import RunLoop
from paceline.engine.run_context import RunContext

# Longest time that an interrupted run waits for its last checkpoint. Schedulers kill 30 s after their signal.
LAST_SAVE_S: Seconds = 25.0


@dataclass(frozen=True)
class Snapshot:
    """What one process holds of a run at one moment.

    Args:
        chunks: its tensors; copied before the next event.
        optimizer: what of the optimizer's state is no tensor.
        engine: what only the engine understands.
    """

    chunks: Iterable[TensorChunk]
    optimizer: Mapping[str, Any]
    engine: Mapping[str, Any] | None = None


class Checkpointer:
    """Saves a run while it lasts, and once at its end; does nothing where no checkpoints were asked for.

    Args:
        context: of the run.
        engine: name of the engine.
        loop: of the run.
        take: returns what this process holds.
        part: number of this process among those that write a part each.
        parts: how many there are.
        run: a token of hexadecimal digits that all of them share; absent: there is one.
    """

    def __init__(
        self,
        context: RunContext,
        engine: str,
        loop: RunLoop,
        take: Callable[[], Snapshot],
        *,
        part: int = 0,
        parts: int = 1,
        run: str | None = None,
    ) -> None:
        self._job, self._engine, self._loop, self._take, self._part = context.job, engine, loop, take, part
        self._options = context.job.checkpoint
        self._writer: CheckpointWriter | None = None
        self._saved: tuple[int, int] | None = None
        """Updates and Δs at the newest save."""
        self.count, self.failures = 0, 0
        self.stall_s: Seconds = 0.0
        """Time in which training stood still for it."""
        if self._options is not None:
            options, token = self._options, run or uuid.uuid4().hex
            self._writer = CheckpointWriter(
                options.folder, part=part, parts=parts, run=token, keep=options.keep, timeout_s=context.job.timeout_s
            )
            self._next = 0.0
            self._advance(loop.start_s)

    def save_if_due(self, now: Seconds) -> None:
        """Save if the interval is over; note how an earlier save has ended."""
        if self._writer is None:
            return
        if self._writer.busy and (result := self._writer.poll()) is not None:
            self._note(result)
        if self._spent(now) >= self._next:
            self._advance(now)
            if self._writer.busy:
                self._say(f"no checkpoint at update {self._loop.coordinator.version}: the last is still being written")
            else:
                self._save(now)

    def finish(self, now: Seconds) -> None:
        """Save the end of training, and wait until it is written."""
        if self._writer is None:
            return
        deadline = time.monotonic() + LAST_SAVE_S
        self._wait(deadline)
        tally = self._loop.coordinator.tally
        if self._saved != (self._loop.coordinator.version, tally.gradients) and not self._writer.busy:
            self._save(now)
            self._wait(deadline)

    def notes(self) -> dict[str, str | int | float]:
        """Return notes for the run's summary."""
        if self._writer is None:
            return {}
        return {
            "checkpoints": self.count,
            "checkpoint_failures": self.failures,
            "checkpoint_stall_s": round(self.stall_s, 6),
        }

    def close(self) -> None:
        """End the writer; a save under way is given up."""
        if self._writer is not None:
            self._writer.close()

    def _spent(self, now: Seconds) -> float:
        assert self._options is not None
        return now if self._options.every_s is not None else self._loop.history.spent(now, "steps")

    def _advance(self, now: Seconds) -> None:
        """Set the next moment to a multiple of the interval."""
        assert self._options is not None
        every = self._options.every_s or self._options.every_steps
        assert every is not None
        self._next = (self._spent(now) // every + 1) * every

    def _save(self, now: Seconds) -> None:
        assert self._writer is not None
        began, job, coordinator = time.monotonic(), self._job, self._loop.coordinator
        snapshot, head = self._take(), None
        if self._part == 0:
            head = {
                "program": job.program.name,
                "strategy": str(job.strategy),
                "engine": self._engine,
                "budget": job.budget.arguments(),
                "fingerprint": dict(job.fingerprint),
                "run": self._loop.state(now, snapshot.engine).to_json(),
                "optimizer": dict(snapshot.optimizer),
            }
        self._writer.begin(coordinator.version, snapshot.chunks, head)
        self._saved = coordinator.version, coordinator.tally.gradients
        self.stall_s += time.monotonic() - began

    def _wait(self, deadline: float) -> None:
        assert self._writer is not None
        if self._writer.busy:
            result = self._writer.wait(max(0.0, deadline - time.monotonic()))
            if result is not None:
                self._note(result)
            else:
                self._say(f"the checkpoint is still being written after {LAST_SAVE_S:g} s, and is given up")

    def _note(self, result: SaveResult) -> None:
        if result.error is None:
            self.count += 1
            return
        self.failures += 1
        self._saved = None
        self._say(f"the checkpoint at update {result.version} failed: {result.error}; training goes on")

    def _say(self, sentence: str) -> None:
        if self._part == 0:
            print(f"paceline: {sentence}", file=sys.stderr)
