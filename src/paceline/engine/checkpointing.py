"""Checkpoints of a run: when one is due, what is in it, and what becomes of it.

::

    engine   ... event ... event | take a snapshot | gradients ... | event ... event ... event ...
    thread                                         | copy          |
    writer                                                         | hash, write, fsync, rename |

An engine calls :meth:`Checkpointer.save_if_due` between two events. What it holds then is copied, at once or until the
engine changes it (:meth:`Checkpointer.settle`), and written by another process while training goes on. A disk that is
full, slow or read-only costs a line on stderr and the next try, never the run.
"""

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.base import TensorChunk
from paceline.checkpoint.writer import CheckpointWriter, SaveResult
from paceline.core.types import Seconds, Version
from paceline.engine.loop import RunLoop
from paceline.engine.own_states import KEY
from paceline.engine.run_context import RunContext
from paceline.replica.optimizer_state import merged_json

# Longest time that an interrupted run waits for its last checkpoint. Schedulers kill 30 s after their signal.
LAST_SAVE_S: Seconds = 25.0


@dataclass(frozen=True)
class Snapshot:
    """What one process holds of a run at one moment.

    Args:
        chunks: its tensors.
        optimizer: what of the optimizer's state is no tensor, as far as this process has it.
        engine: what only the engine understands.
        settles: whether the engine calls :meth:`Checkpointer.settle` before it changes a tensor of the chunks; else
            they are copied at once.
    """

    chunks: Iterable[TensorChunk]
    optimizer: Mapping[str, Any]
    engine: Mapping[str, Any] | None = None
    settles: bool = False


def _merged(parts: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return what only the engine understands of all processes: under each name the entries of all of them."""
    merged, kept = dict[str, Any](), dict[str, list[Mapping[str, Any]]]()
    for part in parts:
        for name, value in (part or {}).items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, Mapping) else value
        for replica, saved in (part or {}).get(KEY, {}).items():
            kept.setdefault(replica, []).append(saved)
    if kept:  # of one replica, each worker says what it has
        merged[KEY] = {replica: merged_json(each) for replica, each in kept.items()}
    return merged or parts[0]


def tell(sentence: str) -> None:
    """Print a sentence for the user on stderr."""
    print(f"paceline: {sentence}", file=sys.stderr)


class Checkpointer:
    """Saves a run while it lasts, and once at its end; does nothing where no checkpoints were asked for.

    Args:
        context: of the run.
        loop: of the run.
        take: returns what this process holds.
        part: number of this process among those that write a part each; None: it has nothing to write.
        parts: how many there are.
        run: a token of hexadecimal digits that all of them share; absent: there is one.
        gather: returns the value of each process of a run that several control; they call it together.
        say: tells the user what failed.
    """

    def __init__(
        self,
        context: RunContext,
        loop: RunLoop,
        take: Callable[[], Snapshot],
        *,
        part: int | None = 0,
        parts: int = 1,
        run: str | None = None,
        gather: Callable[[Any], Sequence[Any]] = lambda value: [value],
        say: Callable[[str], None] = tell,
    ) -> None:
        self._job, self._loop, self._take, self._part = context.job, loop, take, part
        self._gather, self._tell = gather, say
        self._options = context.job.checkpoint
        self._writer: CheckpointWriter | None = None
        self._saved: tuple[int, int] | None = None
        """Updates and Δs at the newest save, here or where the run went on."""
        resume = context.job.resume
        self._newest: Version | None = None
        """Version of the newest complete checkpoint."""
        if self._options is not None and resume is not None and resume.folder.parent == self._options.folder:
            self._saved = resume.run.coordinator.version, resume.run.coordinator.tally.gradients
            self._newest = self._saved[0]
        self.saved: list[Version] = []
        """Versions of the checkpoints that are whole, as far as this process has a part in them."""
        self.count, self.failures, self.skipped = 0, 0, 0
        self.stall_s: Seconds = 0.0
        """Time in which training stood still for it."""
        if self._options is not None:
            self._next = 0.0
            self._advance(loop.start_s)
        if self._options is not None and part is not None:
            options, token = self._options, run or uuid.uuid4().hex
            self._writer = CheckpointWriter(
                options.folder, part=part, parts=parts, run=token, keep=options.keep, timeout_s=context.job.timeout_s
            )

    @property
    def busy(self) -> bool:
        """Whether a save is under way; notes how an earlier one has ended."""
        if self._writer is not None and self._writer.busy and (result := self._writer.poll()) is not None:
            self._note(result)
        return self._writer is not None and self._writer.busy

    def save_if_due(self, now: Seconds, *, busy: bool | None = None) -> None:
        """Save if it :meth:`is_due`."""
        if self.is_due(now, busy=busy):
            self.save(now)

    def is_due(self, now: Seconds, *, busy: bool | None = None) -> bool:
        """Return whether the interval is over, and the last save as well; then another interval begins.

        Args:
            now: training time.
            busy: whether a save is under way in any process of the run; None: there is this one alone.
        """
        if self._options is None:
            return False
        busy = self.busy if busy is None else busy
        if self._spent(now) < self._next:
            return False
        self._advance(now)
        if busy:
            self.skipped += 1
            if self.skipped == 1:
                self._say(
                    f"no checkpoint at update {self._loop.coordinator.version}: the last is still being written, as it "
                    "may be again without a message; write a longer checkpoint_every="
                )
        return not busy

    def save(self, now: Seconds, snapshot: Snapshot | None = None) -> None:
        """Save, as it was a moment ago or is now; not while a save is under way."""
        began, job, coordinator = time.monotonic(), self._job, self._loop.coordinator
        snapshot, head = snapshot or self._take(), None
        held = self._gather((snapshot.optimizer, snapshot.engine))
        optimizer, engine = merged_json([saved for saved, _ in held]), _merged([saved for _, saved in held])
        if self._part == 0:
            head = {
                "program": job.program.name,
                "strategy": str(job.strategy),
                "engine": job.engine,
                "budget": job.budget.arguments(),
                "options": dict(job.options),
                "other_options": job.other_options,
                "interval": self._options.arguments() if self._options is not None else {},
                "fingerprint": dict(job.fingerprint),
                "run": self._loop.state(now, engine).to_json(),
                "optimizer": optimizer,
            }
        if self._writer is not None:
            self._writer.begin(coordinator.version, snapshot.chunks, head)
            if not snapshot.settles:
                self._writer.wait_copied()
        self._saved = coordinator.version, coordinator.tally.gradients
        self.stall_s += time.monotonic() - began

    def settle(self) -> None:
        """Return once what a snapshot holds may change."""
        if self._writer is not None and self._writer.busy:
            began = time.monotonic()
            self._writer.wait_copied()
            self.stall_s += time.monotonic() - began

    def finish(self, now: Seconds) -> None:
        """Save the end of training, unless it never began, and wait until it is written."""
        if self._options is None or not self._loop.coordinator.begun:
            return
        deadline = time.monotonic() + LAST_SAVE_S
        self._wait(deadline)
        reached = self._loop.coordinator.version, self._loop.coordinator.tally.gradients
        if any(self._gather(self._saved != reached)) and not any(self._gather(self.busy)):
            self.save(now)
            self._wait(deadline)

    def take_over(self) -> None:
        """Write from now on what another process has written alone that is dead; what it was at may be lost."""
        if self._options is not None and self._writer is None:
            options, self._part, self._saved = self._options, 0, None
            self._writer = CheckpointWriter(
                options.folder, run=uuid.uuid4().hex, keep=options.keep, timeout_s=self._job.timeout_s
            )

    def replicated(self) -> tuple[Any, ...]:
        """Return what the processes of a run have in common of it, for :meth:`replicate` in one that joins."""
        return (self._next if self._options is not None else 0.0), self._saved, self._newest

    def replicate(self, other: tuple[Any, ...]) -> None:
        """Save at the same moments as another process."""
        self._next, self._saved, self._newest = other

    def notes(self) -> dict[str, str | int | float]:
        """Return notes for the run's summary."""
        if self._options is None:
            return {}
        newest = {} if self._newest is None else {"checkpoint_updates": self._newest}
        return {
            **newest,
            "checkpoints": self.count,
            "checkpoint_failures": self.failures,
            "checkpoints_skipped": self.skipped,
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

    def _wait(self, deadline: float) -> None:
        if self._writer is not None and self._writer.busy:
            result = self._writer.wait(max(0.0, deadline - time.monotonic()))
            if result is not None:
                self._note(result)
            else:
                self._say(f"the checkpoint is still being written after {LAST_SAVE_S:g} s, and is given up")

    def _note(self, result: SaveResult) -> None:
        if result.error is None:
            self.count += 1
            self._newest = result.version
            self.saved.append(result.version)
            if self._options is not None and self._part == 0:
                self._loop.tell(self._options.folder / f"step-{result.version}")
            return
        self.failures += 1
        self._saved = None
        self._say(f"the checkpoint at update {result.version} failed: {result.error}; training goes on")

    def _say(self, sentence: str) -> None:
        if self._part == 0:
            self._tell(sentence)
