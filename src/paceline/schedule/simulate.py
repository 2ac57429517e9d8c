"""When each action of a schedule happens, for given times."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplicas
from paceline.core.types import Nanoseconds, Seconds
from paceline.schedule.base import Action, Kind, Schedule
from paceline.schedule.check import Value, makes, needs, walk
from paceline.schedule.dependencies import Dependencies
from paceline.trace import spans
from paceline.trace.spans import Span


@dataclass(frozen=True)
class StageTimes:
    """How long each part of a model takes for one micro-batch, in seconds; an update takes no time.

    Args:
        forward: one entry a part.
        backward_input: of the gradient of what a part was given.
        backward_weight: of the gradient of its weights; a backward that is not split takes the sum of the two.
        transfer: of what one worker sends to another, from end to end; both may go on working.

    Raises:
        InputError: not one entry a part, or a negative time.
    """

    forward: tuple[Seconds, ...]
    backward_input: tuple[Seconds, ...]
    backward_weight: tuple[Seconds, ...]
    transfer: Seconds = 0.0

    def __post_init__(self) -> None:
        for name in ("backward_input", "backward_weight"):
            if len(getattr(self, name)) != self.parts:
                raise InputError(
                    f"{name} has {len(getattr(self, name))} times, forward {self.parts}; write one a part in each."
                )
        for each in fields(self):
            value = getattr(self, each.name)
            if min(value if isinstance(value, tuple) else (value,), default=0) < 0:
                raise InputError(f"{each.name}={value}, but no time is negative; write {each.name}=0.0, say.")

    @classmethod
    def equal(
        cls,
        parts: int,
        *,
        forward: Seconds = 1.0,
        backward_input: Seconds = 1.0,
        backward_weight: Seconds = 1.0,
        transfer: Seconds = 0.0,
    ) -> "StageTimes":
        """The same for all parts; by default backward takes twice as long as forward."""
        return cls((forward,) * parts, (backward_input,) * parts, (backward_weight,) * parts, transfer)

    @classmethod
    def balanced(cls, schedule: Schedule, workers: int, columns: StageReplicas | None = None) -> "StageTimes":
        """One second, and two backward, for each part, times as many as take turns at its stage."""
        parts = range(schedule.parts(workers))
        many = [1] * workers if columns is None else columns.copies
        each = tuple(float(many[schedule.worker_of(part, workers)]) for part in parts)
        return cls(each, each, each)

    @property
    def parts(self) -> int:
        """Of the model."""
        return len(self.forward)

    def of(self, action: Action) -> Seconds:
        """How long an action takes."""
        return sum((getattr(self, name)[action.stage] for name in _TAKES[action.kind]), start=0.0)


_TAKES: dict[Kind, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward_input", "backward_weight"),
    "backward_input": ("backward_input",),
    "backward_weight": ("backward_weight",),
    "update": (),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """An action, and when a worker does it."""

    worker: int
    action: Action
    start_ns: Nanoseconds
    end_ns: Nanoseconds


def timeline(
    schedule: Schedule,
    times: StageTimes,
    workers: int,
    micro_batches: int,
    columns: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> Iterator[Timed]:
    """Each action begins when its worker is free and what it needs is there; in an order in which they could be done.

    Lazy: a stream may be as long as one likes.

    Args:
        schedule: any; where columns take turns, one that lets them.
        times: of its parts, for one micro-batch on one worker.
        workers: p.
        micro_batches: m.
        columns: that take turns at the stages, and are then the workers of what is told; None: one at each.
        dependencies: which parts need which; None: each needs the one before it.

    Raises:
        InputError: times or dependencies of another number of parts, or what the schedule refuses.
    """
    schedule.refuse(workers, micro_batches)
    parts = schedule.parts(workers)
    needed = dependencies or Dependencies.chain(parts)
    for what, count in (("times", times.parts), ("dependencies", needed.parts)):
        if count != parts:
            raise InputError(f"{what} of {count} parts, but stages={workers} makes {parts}; write {parts} of each.")
    orders = _orders(schedule, workers, micro_batches, columns)
    free, there = [0] * len(orders), dict[tuple[Value, int], tuple[int, Nanoseconds]]()
    delay = _ns(times.transfer)
    for worker, action in walk(orders, needed):
        part = action.stage
        arrivals = [there.pop((value, part)) for value in needs(action, needed) if value[1] != part]
        start = max([free[worker], *(end + delay * (maker != worker) for maker, end in arrivals)])
        free[worker] = start + _ns(times.of(action))
        for value in makes(action):
            there.update(((value, other), (worker, free[worker])) for other in _handed_on(value, needed))
        yield Timed(worker, action, start, free[worker])


def _orders(
    schedule: Schedule, workers: int, micro_batches: int, columns: StageReplicas | None
) -> list[Iterator[Action]]:
    """What each does."""
    if columns is None or max(columns.copies) == 1:
        return [schedule.actions(worker, workers, micro_batches) for worker in range(workers)]
    return [schedule.column(column, columns, micro_batches) for column in columns]


def _handed_on(value: Value, dependencies: Dependencies) -> tuple[int, ...]:
    """The parts that need it, each once; what only its maker needs is there when that is free."""
    what, part, _ = value
    if what == "activations":
        return dependencies.consumers(part)
    return dependencies.returned(part) if what == "gradient" else ()


def by_end(run: Iterator[Timed], workers: int) -> Iterator[Timed]:
    """A timeline in the order in which actions end, then of workers; as lazily as that can be had."""
    waiting: list[deque[Timed]] = [deque() for _ in range(workers)]
    for each in run:
        waiting[each.worker].append(each)
        while all(waiting):
            yield min(waiting, key=lambda line: _end(line[0])).popleft()
    yield from sorted((each for line in waiting for each in line), key=_end)


def _end(timed: Timed) -> tuple[Nanoseconds, int]:
    return timed.end_ns, timed.worker


def simulate(
    schedule: Schedule,
    times: StageTimes,
    workers: int,
    micro_batches: int,
    columns: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> list[Span]:
    """The spans of one mini-batch, as a run would record them: ``stage`` is the worker, ``apply`` an update.

    Args:
        schedule: any.
        times: of its parts.
        workers: p.
        micro_batches: m; where weights don't wait for the end of a mini-batch, of the whole stream.
        columns: that take turns at the stages, ``shard`` then says which of a stage; None: one at each.
        dependencies: which parts need which; None: each needs the one before it.

    Returns:
        By their start; nothing is recorded where a worker waits.

    >>> from paceline.schedule import parse
    >>> max(span.end_ns for span in simulate(parse("gpipe"), StageTimes.equal(4), 4, 8)) / 1e9
    33.0

    A first stage that takes twice the time, alone and with two who take turns at it:

    >>> from paceline.core.mesh import StageReplicas
    >>> slow = StageTimes((2.0, 1.0), (2.0, 1.0), (2.0, 1.0))
    >>> spans = [simulate(parse("1f1b"), slow, 2, 8, StageReplicas(n)) for n in ((1, 1), (2, 1))]
    >>> [max(span.end_ns for span in each) / 1e9 for each in spans]
    [49.0, 30.0]

    Two branches that need nothing of each other, between a trunk and what joins them:

    >>> fork = Dependencies.parse(4, "0-1 0-2 1-3 2-3")
    >>> [max(span.end_ns for span in simulate(parse("gpipe"), StageTimes.equal(4), 4, 8, None, d)) / 1e9
    ...  for d in (None, fork)]
    [33.0, 30.0]
    """
    run = timeline(schedule, times, workers, micro_batches, columns, dependencies)
    found = sorted(run, key=lambda t: (t.start_ns, t.end_ns, t.worker))
    places = columns or StageReplicas((1,) * workers)
    return [
        Span(0, *places.column(t.worker), _recorded(t.action), 1, t.action.micro_batch, t.start_ns, t.end_ns, 0)
        for t in found
    ]


def _recorded(action: Action) -> spans.Action:
    return "apply" if action.kind == "update" else action.kind


def _ns(seconds: Seconds) -> Nanoseconds:
    return round(seconds * 1e9)
