"""The control words of a run in shared memory: grants, completions, slices of updates, metrics, and sleep flags.

::

    grant r        main --> worker: go / end, attempt, micro-steps, version, Δ slot, lead, cancelled attempt
    completed      worker --> main: for each replica the newest attempt that it has completed
    completions r  worker --> main: the last few attempts: how each ended, samples, loss, ...
    slice r        main --> worker --> main: a slice of an update to compute while idle, and its result
    task           main --> workers: the update that is computed in slices
    versions       main --> workers: the version of A in each buffer, while it is not being written
    metrics        worker --> main: for each worker its figures
    asleep         for each replica and for main: whether it has to be woken

Each word but "asleep" has one writer at a time. The last word of a message to be written is its number (an attempt, a
task), and a :class:`~paceline.comm.wakeup.Wakeup` is notified after it: a reader that sees the number sees the rest.
For a reader that polls without having been woken this relies on stores becoming visible in program order, as on x86.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.types import Nanoseconds, ReplicaId
from paceline.engine.worker_metrics import STEP_TIMES, Figures

# Completions kept of each worker: the attempts that it may be ahead of what main has read.
COMPLETIONS = 64

# Words of one completion.
COMPLETION_WORDS = 10

# Words of a task, without the list of its Δs.
TASK_WORDS = 32

GO, END = 1, 2
ARRIVED, CANCELLED = 1, 2

# The version of a buffer that is incomplete.
BEING_WRITTEN = -1

# pack_into zeroes its target first, so the number that publishes a message is written by itself, after the rest.
_GRANT = struct.Struct("=qqqqqqqqqq")
_GRANT_REST = struct.Struct("=qqqqqqqqq")
_COMPLETION = struct.Struct("=qqqqq?7xdqdq")
_FIGURES = struct.Struct("=qqqq")
_SLICE = struct.Struct("=qqq")
_TASK = struct.Struct("=qqqqqqq")
_DELTA = struct.Struct("=qqd")

# Offsets of the words of one replica: the grant (10), the sleep flag, and its slice of a task.
_ASLEEP, _SLICE_AT, _WORDS = 10, 12, 16


class Grant(NamedTuple):
    """Permission for a replica to compute Δs, or the end of training."""

    attempt: int
    """The newest attempt that it may begin; with ``lead``: that many more."""
    kind: int
    micro_steps: int
    version: int
    buffer: int
    """Index of the buffer of that version."""
    slot: int
    """Index of the buffer for Δ."""
    lead: int
    at_ns: Nanoseconds
    stream: int
    first: int
    """Of the batches, a micro-step on each; with ``lead``, those that follow in the stream."""


class Completion(NamedTuple):
    """The end of one attempt."""

    ending: int
    attempt: int
    version: int
    slot: int
    samples: int
    finite: bool
    loss: float
    at_ns: Nanoseconds
    square: float = 0.0
    pieces: int = 0
    """Norms of its micro-steps (:class:`~paceline.replica.base.Micro`); 0 pieces: they were not measured."""


class UpdateSlice(NamedTuple):
    """One worker's slice of a task, one ``of`` several; they are numbered from 0 on."""

    task: int
    number: int
    of: int


class UpdateTask(NamedTuple):
    """An update that is computed in slices."""

    number: int
    only_sum: bool
    """Whether Σ weight·Δ alone is computed."""
    of_sum: bool
    """Whether the gradient is the Σ weight·Δ of the previous task, times the only weight."""
    source: int
    destination: int
    """Buffer indices of the present version and of the next one."""
    memory: int
    """Index of the present copy of the optimizer's state."""
    kernel: tuple[float, ...]
    """The encoded step kernel."""
    deltas: tuple[tuple[ReplicaId, int, float], ...]
    """(replica, slot, weight) of each Δ."""


class MetricsBlock:
    """The figures of all workers of a run, which outlive their processes.

    Args:
        words: :attr:`WORDS` words of shared memory for each worker, zero at first.
        workers: of all replicas.
    """

    _EACH = 4 + STEP_TIMES  # figures and step times
    WORDS = _EACH + 1
    """Words of one worker: these, and its bytes of parameters."""

    def __init__(self, words: memoryview, workers: int) -> None:
        self._bytes, self._reals = words, words.cast("d")
        first = workers * self._EACH
        self.parameter_bytes = words.cast("q")[first : first + workers]
        """Bytes of parameters of each worker."""

    def measure(self, worker: int, figures: Figures, step_time_s: float | None = None) -> None:
        """Write a worker's figures, and the time of one more step."""
        if step_time_s is not None:
            self._reals[worker * self._EACH + 4 + figures.steps % STEP_TIMES] = step_time_s
        _FIGURES.pack_into(self._bytes, 8 * worker * self._EACH, *figures)

    def figures(self, worker: int) -> Figures:
        """Return a worker's figures."""
        return Figures._make(_FIGURES.unpack_from(self._bytes, 8 * worker * self._EACH))

    def step_times(self, worker: int) -> list[float]:
        """Return a worker's latest step times, in seconds, in no order."""
        first = worker * self._EACH + 4
        return [t for t in self._reals[first : first + STEP_TIMES].tolist() if t > 0]


class ControlBlock:
    """A view of the control words of a run.

    Args:
        words: :meth:`size` words of shared memory, zero at first.
        replicas: P.
        workers: of all replicas.
    """

    def __init__(self, words: memoryview, replicas: int, workers: int) -> None:
        self._bytes = words
        self._words, self._reals = words.cast("q"), words.cast("d")
        at = replicas * _WORDS

        def words_for(count: int) -> "memoryview[int]":
            nonlocal at
            at += count
            return self._words[at - count : at]

        self._main = words_for(8)
        self.cancelled = words_for(replicas)
        """The newest cancelled attempt of each replica."""
        self.paused_until_ns = words_for(replicas)
        """The end of each replica's last delay that the job asked for: it reports nothing until then; 0: none."""
        self.versions = words_for(replicas + 2)
        """The version in each buffer; :data:`BEING_WRITTEN`: none."""
        self.completed, self.steps = words_for(replicas), words_for(replicas)
        """The newest completed attempt of each replica, and its number of completed steps with samples."""
        self.finished_slices = words_for(replicas)
        """The newest task of each replica whose slice it has finished."""
        self.slice_squares = self._reals[at : at + replicas]
        """The squared norm of Σ weight·Δ of each replica's finished slice."""
        self._completions_at = at + replicas
        metrics_at = self._completions_at + replicas * COMPLETIONS * COMPLETION_WORDS
        self._task_at = metrics_at + workers * MetricsBlock.WORDS
        self.metrics = MetricsBlock(words[8 * metrics_at : 8 * self._task_at], workers)

    @staticmethod
    def size(replicas: int, slots: int, workers: int) -> int:
        """Return the number of words."""
        each = _WORDS + 7 + COMPLETIONS * COMPLETION_WORDS + 3 * slots
        return replicas * each + 8 + 2 + workers * MetricsBlock.WORDS + TASK_WORDS

    def begin_at(self, attempts: Sequence[int], version: int) -> None:
        """Let each replica's next attempt follow these, where a run goes on; all steps so far made ``version``."""
        for replica, attempt in enumerate(attempts):
            self._words[replica * _WORDS] = self.completed[replica] = attempt
        self.steps[0] = version

    def sleep_flag(self, replica: ReplicaId | None) -> "memoryview[int]":
        """Return the word that says whether a replica sleeps; None: main."""
        return self._main[:1] if replica is None else self._words[replica * _WORDS + _ASLEEP :][:1]

    # ---------------------------------------------------------------------------------------------------------- grants

    def write_grant(self, replica: ReplicaId, grant: Grant) -> None:
        """Publish a grant."""
        at = replica * _WORDS
        _GRANT_REST.pack_into(self._bytes, 8 * (at + 1), *grant[1:])
        self._words[at] = grant.attempt  # last: a reader that sees it sees the rest

    def read_grant(self, replica: ReplicaId) -> Grant:
        """Return the newest grant."""
        return Grant._make(_GRANT.unpack_from(self._bytes, 8 * replica * _WORDS))

    def granted(self, replica: ReplicaId) -> int:
        """Return the attempt of the newest grant."""
        return self._words[replica * _WORDS]

    def last_allowed(self, replica: ReplicaId) -> int:
        """Return the newest attempt that a replica may begin, its lead included."""
        at = replica * _WORDS
        return self._words[at] + self._words[at + 6]

    def ended(self, replica: ReplicaId) -> bool:
        """Return whether training has ended for a replica."""
        return self._words[replica * _WORDS + 1] == END

    # ----------------------------------------------------------------------------------------------------- completions

    def write_completion(self, replica: ReplicaId, completion: Completion) -> None:
        """Publish the end of an attempt."""
        _COMPLETION.pack_into(self._bytes, self._completion_at(replica, completion.attempt), *completion)
        self.steps[replica] += completion.ending == ARRIVED and completion.samples > 0 and completion.finite
        self.completed[replica] = completion.attempt  # last: a reader that sees it sees the rest

    def completion(self, replica: ReplicaId, attempt: int) -> Completion:
        """Return the end of one of the last attempts."""
        return Completion._make(_COMPLETION.unpack_from(self._bytes, self._completion_at(replica, attempt)))

    def _completion_at(self, replica: ReplicaId, attempt: int) -> int:
        return 8 * (self._completions_at + (replica * COMPLETIONS + attempt % COMPLETIONS) * COMPLETION_WORDS)

    # ------------------------------------------------------------------------------------------------ updates in slices

    def write_task(self, task: UpdateTask) -> None:
        """Describe the update that is to be computed in slices; no slice of it is assigned yet."""
        at = 8 * self._task_at
        numbers = task.number, task.only_sum, task.of_sum, task.source, task.destination, task.memory, len(task.deltas)
        _TASK.pack_into(self._bytes, at, *numbers)
        struct.pack_into(f"={len(task.kernel)}d", self._bytes, at + _TASK.size, *task.kernel)
        for i, delta in enumerate(task.deltas):
            _DELTA.pack_into(self._bytes, at + 8 * TASK_WORDS + i * _DELTA.size, *delta)

    def read_task(self) -> UpdateTask:
        """Return the newest task."""
        at = 8 * self._task_at
        number, only_sum, of_sum, source, destination, memory, count = _TASK.unpack_from(self._bytes, at)
        kernel = tuple(self._reals[self._task_at + _TASK.size // 8 : self._task_at + TASK_WORDS].tolist())
        first = at + 8 * TASK_WORDS
        deltas = tuple(_DELTA.unpack_from(self._bytes, first + i * _DELTA.size) for i in range(count))
        return UpdateTask(number, bool(only_sum), bool(of_sum), source, destination, memory, kernel, deltas)

    def assign_slice(self, replica: ReplicaId, part: UpdateSlice) -> None:
        """Assign a slice of the newest task."""
        at = replica * _WORDS + _SLICE_AT
        self._words[at + 1], self._words[at + 2] = part.number, part.of
        self._words[at] = part.task  # last: a reader that sees it sees the rest

    def pending_slice(self, replica: ReplicaId) -> UpdateSlice | None:
        """Return a replica's slice that it has not finished."""
        at = replica * _WORDS + _SLICE_AT
        if self._words[at] == self.finished_slices[replica]:
            return None
        return UpdateSlice._make(_SLICE.unpack_from(self._bytes, 8 * at))

    def drop_slice(self, replica: ReplicaId) -> None:
        """Take back the slice of a replica that has died: main has computed it."""
        self.finished_slices[replica] = self._words[replica * _WORDS + _SLICE_AT]

    def finish_slice(self, replica: ReplicaId, part: UpdateSlice, square: float) -> None:
        """Mark a slice as finished; ``square`` is the squared norm of its Σ weight·Δ."""
        self.slice_squares[replica] = square
        self.finished_slices[replica] = part.task  # last: a reader that sees it sees the square
