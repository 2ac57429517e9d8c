"""Event simulation of a schedule: when each action happens, for given times of the parts.

:func:`timeline` covers everything that a pipeline of Paceline can run: any schedule, replicated stages, parts that
depend on each other in any acyclic way, endless streams. It yields every action, in whole nanoseconds. For the end of
a step alone, of parts in a chain, the planner's search has a loop without calls that is some twenty times faster
(``planner/search/event_simulation.py``; the tests hold the two to each other).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplicas
from paceline.core.types import Nanoseconds, Seconds
from paceline.schedule.base import Action, Kind, Schedule
from paceline.schedule.check import Value, makes, needs, walk
from paceline.schedule.dependencies import Dependencies
from paceline.trace.spans import Span


@dataclass(frozen=True)
class StageTimes:
    """Durations of each part of a model for one micro-batch, in seconds; an update takes no time.

    Args:
        forward: one entry a part.
        backward_input: of the gradient of what a part was given.
        backward_weight: of the gradient of its weights; a backward that is not split takes the sum of the two.
        transfer: of a message from one worker to another, from end to end; both may compute meanwhile.

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
        """Return the same times for all parts; by default backward takes twice as long as forward."""
        return cls((forward,) * parts, (backward_input,) * parts, (backward_weight,) * parts, transfer)

    @classmethod
    def balanced(cls, schedule: Schedule, workers: int, stage_replicas: StageReplicas | None = None) -> "StageTimes":
        """Return 1 s forward and 2 s backward for each part, times the number of replicas of its stage."""
        copies = stage_replicas.copies if stage_replicas else (1,) * workers
        each = tuple(float(copies[schedule.worker_of(part, workers)]) for part in range(schedule.parts(workers)))
        return cls(each, each, each)

    @property
    def parts(self) -> int:
        """Number of parts of the model."""
        return len(self.forward)

    def of(self, action: Action) -> Seconds:
        """Return the duration of an action."""
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
    """An action with its worker and its time."""

    worker: int
    action: Action
    start_ns: Nanoseconds
    end_ns: Nanoseconds


def timeline(
    schedule: Schedule,
    times: StageTimes,
    workers: int,
    micro_batches: int,
    stage_replicas: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> Iterator[Timed]:
    """Begin each action when its worker is free and its inputs have arrived; yield in an order that respects both.

    Lazy: a stream may be as long as one likes.

    Args:
        schedule: any; if stages are replicated, one that allows it.
        times: of its parts, for one micro-batch on one worker.
        workers: p.
        micro_batches: m.
        stage_replicas: of the stages, which are then the workers of what is yielded; None: one of each.
        dependencies: which parts need which; None: each needs the one before it.

    Raises:
        InputError: times or dependencies of another number of parts, or what the schedule refuses.
    """
    schedule.refuse(workers, micro_batches)
    parts = schedule.parts(workers)
    dependencies = dependencies or Dependencies.chain(parts)
    for what, count in (("times", times.parts), ("dependencies", dependencies.parts)):
        if count != parts:
            raise InputError(f"{what} of {count} parts, but stages={workers} makes {parts}; write {parts} of each.")
    orders = schedule.orders(workers, micro_batches, stage_replicas)
    free = [0] * len(orders)
    # Values under way to another part, by (value, part): the worker that made each and when it was done. What only
    # its maker needs is there when that worker is free.
    under_way = dict[tuple[Value, int], tuple[int, Nanoseconds]]()
    delay = _ns(times.transfer)
    for worker, action in walk(orders, dependencies):
        part = action.stage
        arrivals = [under_way.pop((value, part)) for value in needs(action, dependencies) if value[1] != part]
        start = max([free[worker], *(end + delay * (maker != worker) for maker, end in arrivals)])
        free[worker] = start + _ns(times.of(action))
        for value in makes(action):
            if value[0] == "activations":
                receivers = dependencies.consumers(part)
            else:
                receivers = dependencies.returned(part) if value[0] == "gradient" else ()
            under_way.update(((value, receiver), (worker, free[worker])) for receiver in receivers)
        yield Timed(worker, action, start, free[worker])


def by_end(run: Iterator[Timed], workers: int) -> Iterator[Timed]:
    """Yield a timeline in the order in which actions end, then of workers; as lazily as that allows."""

    def end(timed: Timed) -> tuple[Nanoseconds, int]:
        return timed.end_ns, timed.worker

    waiting: list[deque[Timed]] = [deque() for _ in range(workers)]
    for each in run:
        waiting[each.worker].append(each)
        while all(waiting):  # no worker can end anything earlier any more
            yield min(waiting, key=lambda line: end(line[0])).popleft()
    yield from sorted((each for line in waiting for each in line), key=end)


def simulate(
    schedule: Schedule,
    times: StageTimes,
    workers: int,
    micro_batches: int,
    stage_replicas: StageReplicas | None = None,
    dependencies: Dependencies | None = None,
) -> list[Span]:
    """Return the spans of one mini-batch, as a run would record them: ``stage`` is the worker, ``apply`` an update.

    Args:
        schedule: any.
        times: of its parts.
        workers: p.
        micro_batches: m; of the whole stream if weights don't wait for the end of a mini-batch.
        stage_replicas: of the stages, ``shard`` then numbers those of a stage; None: one of each.
        dependencies: which parts need which; None: each needs the one before it.

    Returns:
        Spans by their start; none while a worker waits.

    >>> from paceline.schedule import parse
    >>> max(span.end_ns for span in simulate(parse("gpipe"), StageTimes.equal(4), 4, 8)) / 1e9
    33.0

    A first stage that takes twice the time, alone and replicated:

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
    run = timeline(schedule, times, workers, micro_batches, stage_replicas, dependencies)
    coordinates = stage_replicas or StageReplicas((1,) * workers)
    return [
        Span(
            0,
            *coordinates.at(timed.worker),
            "apply" if timed.action.kind == "update" else timed.action.kind,
            1,
            timed.action.micro_batch,
            timed.start_ns,
            timed.end_ns,
            0,
        )
        for timed in sorted(run, key=lambda t: (t.start_ns, t.end_ns, t.worker))
    ]


def _ns(seconds: Seconds) -> Nanoseconds:
    return round(seconds * 1e9)
