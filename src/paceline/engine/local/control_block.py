"""The words of control in a run's shared memory: what workers are told, what they tell, and who sleeps.

::

    order r        main --> worker: go / end, attempt, micro-steps, version, Δ slot, how far ahead, cancelled attempt
    told           worker --> main: for each worker the newest attempt that it has reported
    reports r      worker --> main: the last few attempts: how each ended, samples, loss, ...
    part r         main --> worker --> main: a part of an update to make while it waits, and that it is made
    task           main --> workers: what is made in parts
    stamps         main --> workers: which version lies in each place, while nobody writes there
    asleep         for each worker and for main: whether it has to be rung

Each word but "asleep" has one writer at a time. The last word of a message to be written is its number (an attempt, a
task), and an :class:`~paceline.comm.wakeup.Wakeup` is rung after it: who sees the number sees the rest. For who looks
without having been rung this relies on stores that become visible in their order, as they do on x86.

The figures of the workers of a run whose replicas have several, where they outlive them.
"""

import struct
from typing import NamedTuple

from paceline.core.types import ReplicaId
from paceline.engine.worker_metrics import STEP_TIMES, Figures

REPORTS = 64
"""How many of a worker's latest reports are kept: it may be that many attempts ahead of what main has looked at."""

REPORT_WORDS = 10
"""Of one report."""

TASK_WORDS = 32
"""Of the description of a task, without the list of its Δs."""

GO, END = 1, 2
ARRIVED, CANCELLED = 1, 2

BEING_WRITTEN = -1
"""The stamp of a place in which no version lies whole."""

# pack_into clears what it writes to first: the number of a message, which says that it is there, is never among it.
_ORDER = struct.Struct("=qqqqqqqq")
_ORDER_REST = struct.Struct("=qqqqqqq")
_REPORT = struct.Struct("=qqqqq?7xdqdq")
_FIGURES = struct.Struct("=qqqq")
_PART = struct.Struct("=qqq")
_TASK = struct.Struct("=qqqqqqq")
_DELTA = struct.Struct("=qqd")

# Words of one worker: the order, then one each, its figures, its part of a task.
_CANCELLED, _EXCUSED, _ASLEEP, _FIGURES_AT, _PART_AT, _DONE, _SQUARE, _WORDS = 8, 9, 10, 16, 24, 28, 29, 32


class Grant(NamedTuple):
    """What a worker is told."""

    attempt: int
    """The newest that it may begin, or with ``ahead``: that many more."""
    kind: int
    micro_steps: int
    version: int
    place: int
    """Where that version lies."""
    slot: int
    ahead: int
    at_ns: int


class Completion(NamedTuple):
    """What a worker tells of one attempt."""

    ending: int
    attempt: int
    version: int
    slot: int
    samples: int
    finite: bool
    loss: float
    at_ns: int
    square: float = 0.0
    pieces: int = 0
    """What was seen of its micro-steps (:class:`~paceline.replica.base.Micro`); 0 pieces: nothing."""


class UpdateSlice(NamedTuple):
    """One worker's part of a task, one ``of`` several; they are numbered from 0 on."""

    task: int
    number: int
    of: int


class UpdateTask(NamedTuple):
    """An update that is made in parts; ``kernel`` are its numbers, ``deltas`` are (replica, slot, weight)."""

    number: int
    only_sum: bool
    """Whether Σ weight·Δ alone is asked for."""
    of_sum: bool
    """Whether the gradient is the Σ weight·Δ that was made before, times the only weight."""
    here: int
    there: int
    """Places of versions."""
    memory: int
    """Which copy of the optimizer's memory is the old one."""
    kernel: tuple[float, ...]
    deltas: tuple[tuple[ReplicaId, int, float], ...]


class ControlBlock:
    """A view of the words.

    Args:
        words: as many as :meth:`size` says, zeros at first.
        replicas: P.
    """

    def __init__(self, words: memoryview, replicas: int) -> None:
        self._bytes = words
        self._words, self._reals = words.cast("q"), words.cast("d")
        self._told_at = replicas * _WORDS
        self._told = self._words[self._told_at : self._told_at + replicas]
        self._moves = self._words[self._told_at + replicas : self._told_at + 2 * replicas]
        self._main_at = self._told_at + 2 * replicas
        self._reports_at = self._main_at + 8
        self._times_at = self._reports_at + replicas * REPORTS * REPORT_WORDS
        self._stamps_at = self._times_at + replicas * STEP_TIMES
        self._task_at = self._stamps_at + replicas + 2

    @staticmethod
    def size(replicas: int, slots: int) -> int:
        """Words of a board."""
        each = _WORDS + 2 + REPORTS * REPORT_WORDS + STEP_TIMES + 3 * slots
        return replicas * each + 8 + replicas + 2 + TASK_WORDS

    def sleep_flag(self, replica: ReplicaId | None) -> "memoryview[int]":
        """The word that says whether a worker, or None: main, sleeps."""
        at = self._main_at if replica is None else replica * _WORDS + _ASLEEP
        return self._words[at : at + 1]

    # ---------------------------------------------------------------------------------------------------------- orders

    def write_grant(self, replica: ReplicaId, order: Grant) -> None:
        """Write an order."""
        at = replica * _WORDS
        _ORDER_REST.pack_into(self._bytes, 8 * (at + 1), *order[1:])
        self._words[at] = order.attempt

    def read_grant(self, replica: ReplicaId) -> Grant:
        """The newest order."""
        return Grant._make(_ORDER.unpack_from(self._bytes, 8 * replica * _WORDS))

    def granted(self, replica: ReplicaId) -> int:
        """The newest attempt that a worker was released for."""
        return self._words[replica * _WORDS]

    def last_allowed(self, replica: ReplicaId) -> int:
        """The newest attempt that a worker may begin."""
        at = replica * _WORDS
        return self._words[at] + self._words[at + 6]

    def ended(self, replica: ReplicaId) -> bool:
        """Whether a worker was told to end."""
        return self._words[replica * _WORDS + 1] == END

    def cancel(self, replica: ReplicaId, attempt: int) -> None:
        """Call an attempt off."""
        self._words[replica * _WORDS + _CANCELLED] = attempt

    def cancelled(self, replica: ReplicaId) -> int:
        """The newest attempt that was called off."""
        return self._words[replica * _WORDS + _CANCELLED]

    def set_pause(self, replica: ReplicaId, until_ns: int) -> None:
        """Say that nothing will be heard of a worker until then: it is in a delay that was asked for."""
        self._words[replica * _WORDS + _EXCUSED] = until_ns

    def paused_until(self, replica: ReplicaId) -> int:
        """Until when nothing will be heard of a worker; 0 where there was no delay."""
        return self._words[replica * _WORDS + _EXCUSED]

    # ---------------------------------------------------------------------------------------------------------- stamps

    def set_version(self, place: int, version: int) -> None:
        """Say which version lies in a place from now on; :data:`BEING_WRITTEN`: it is being written."""
        self._words[self._stamps_at + place] = version

    def version_in(self, place: int) -> int:
        """Which version lies in a place."""
        return self._words[self._stamps_at + place]

    # --------------------------------------------------------------------------------------------------------- reports

    def write_completion(self, replica: ReplicaId, report: Completion) -> None:
        """Write a report."""
        _REPORT.pack_into(self._bytes, self._report_at(replica, report.attempt), *report)
        self._moves[replica] += report.ending == ARRIVED and report.samples > 0
        self._told[replica] = report.attempt

    def completed(self) -> list[int]:
        """For each worker the newest attempt that it has reported."""
        return self._told.tolist()

    def step_count(self) -> int:
        """How many steps with samples have been reported, by all."""
        return sum(self._moves.tolist())

    def completion(self, replica: ReplicaId, attempt: int) -> Completion:
        """The report of one of the last attempts."""
        return Completion._make(_REPORT.unpack_from(self._bytes, self._report_at(replica, attempt)))

    def _report_at(self, replica: ReplicaId, attempt: int) -> int:
        return 8 * (self._reports_at + (replica * REPORTS + attempt % REPORTS) * REPORT_WORDS)

    # ----------------------------------------------------------------------------------------------------------- tasks

    def write_task(self, task: UpdateTask) -> None:
        """Write what is to be made in parts."""
        at = 8 * self._task_at
        kernel = struct.Struct(f"={len(task.kernel)}d")
        numbers = (task.number, task.only_sum, task.of_sum, task.here, task.there, task.memory, len(task.deltas))
        _TASK.pack_into(self._bytes, at, *numbers)
        kernel.pack_into(self._bytes, at + _TASK.size, *task.kernel)
        for i, delta in enumerate(task.deltas):
            _DELTA.pack_into(self._bytes, at + 8 * TASK_WORDS + i * _DELTA.size, *delta)

    def read_task(self) -> UpdateTask:
        """The newest task."""
        at = 8 * self._task_at
        number, only_sum, of_sum, here, there, memory, count = _TASK.unpack_from(self._bytes, at)
        reals = self._task_at + _TASK.size // 8
        kernel = tuple(self._reals[reals : self._task_at + TASK_WORDS].tolist())
        first = at + 8 * TASK_WORDS
        deltas = tuple(_DELTA.unpack_from(self._bytes, first + i * _DELTA.size) for i in range(count))
        return UpdateTask(number, bool(only_sum), bool(of_sum), here, there, memory, kernel, deltas)

    def assign_slice(self, replica: ReplicaId, part: UpdateSlice) -> None:
        """Write what a worker's part of the newest task is."""
        at = replica * _WORDS + _PART_AT
        self._words[at + 1], self._words[at + 2] = part.number, part.of
        self._words[at] = part.task

    def pending_slice(self, replica: ReplicaId) -> UpdateSlice | None:
        """A worker's part that it has not made."""
        at = replica * _WORDS + _PART_AT
        if self._words[at] == self._words[replica * _WORDS + _DONE]:
            return None
        return UpdateSlice._make(_PART.unpack_from(self._bytes, 8 * at))

    def finish_slice(self, replica: ReplicaId, part: UpdateSlice, square: float) -> None:
        """A worker has made its part; ``square`` is the squared norm of its Σ weight·Δ."""
        self._reals[replica * _WORDS + _SQUARE] = square
        self._words[replica * _WORDS + _DONE] = part.task

    def slice_finished(self, replica: ReplicaId, task: int) -> bool:
        """Whether a worker has made its part of a task."""
        return self._words[replica * _WORDS + _DONE] == task

    def slice_square(self, replica: ReplicaId) -> float:
        """What a worker gave to :meth:`made`."""
        return self._reals[replica * _WORDS + _SQUARE]

    # --------------------------------------------------------------------------------------------------------- figures

    def measure(self, replica: ReplicaId, figures: Figures, step_time_s: float | None = None) -> None:
        """Write a worker's figures, and the time of one more step."""
        if step_time_s is not None:
            self._reals[self._times_at + replica * STEP_TIMES + figures.steps % STEP_TIMES] = step_time_s
        _FIGURES.pack_into(self._bytes, 8 * (replica * _WORDS + _FIGURES_AT), *figures)

    def figures(self, replica: ReplicaId) -> Figures:
        """A worker's figures."""
        return Figures._make(_FIGURES.unpack_from(self._bytes, 8 * (replica * _WORDS + _FIGURES_AT)))

    def step_times(self, replica: ReplicaId) -> list[float]:
        """A worker's latest step times, in seconds, in no order."""
        first = self._times_at + replica * STEP_TIMES
        return [t for t in self._reals[first : first + STEP_TIMES].tolist() if t > 0]


_BLOCK_FIGURES = struct.Struct("=qqqq")
_EACH = 5 + STEP_TIMES


class MetricsBlock:
    """A view of words of shared memory.

    Args:
        words: as many as :meth:`size` says, zeros at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._bytes, self._words, self._reals = words, words.cast("q"), words.cast("d")

    @staticmethod
    def size(workers: int) -> int:
        """Words of a sheet."""
        return workers * _EACH

    def measure(self, worker: int, figures: Figures, step_time_s: float | None = None) -> None:
        """Write a worker's figures, and the time of one more step."""
        if step_time_s is not None:
            self._reals[worker * _EACH + 5 + figures.steps % STEP_TIMES] = step_time_s
        _BLOCK_FIGURES.pack_into(self._bytes, 8 * worker * _EACH, *figures)

    def figures(self, worker: int) -> Figures:
        """A worker's figures."""
        return Figures._make(_BLOCK_FIGURES.unpack_from(self._bytes, 8 * worker * _EACH))

    def step_times(self, worker: int) -> list[float]:
        """A worker's latest step times, in seconds, in no order."""
        first = worker * _EACH + 5
        return [t for t in self._reals[first : first + STEP_TIMES].tolist() if t > 0]

    def set_parameter_bytes(self, worker: int, nbytes: int) -> None:
        """Write how many bytes of parameters a worker has."""
        self._words[worker * _EACH + 4] = nbytes

    def parameter_bytes_of(self, worker: int) -> int:
        """How many bytes of parameters a worker has."""
        return self._words[worker * _EACH + 4]
