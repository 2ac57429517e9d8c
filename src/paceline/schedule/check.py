"""A topological order of a schedule's actions, and what must hold for every schedule.

What must hold for every schedule, and what its activations cost.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplica, StageReplicas
from paceline.schedule.base import Action, Kind, Schedule
from paceline.schedule.dependencies import Dependencies

Value: TypeAlias = tuple[Literal["activations", "gradient", "weights' gradient"], int, int]
"""What is made, by which part, of which micro-batch."""


class Made:
    """Which values there are; of those that a part makes in ascending order only how many, for streams may be long."""

    def __init__(self) -> None:
        self._below: dict[tuple[str, int], int] = defaultdict(int)
        self._beyond: dict[tuple[str, int], set[int]] = defaultdict(set)

    def add(self, value: Value) -> None:
        """It is there now."""
        what, part, i = value
        beyond = self._beyond[what, part]
        beyond.add(i)
        while self._below[what, part] in beyond:
            beyond.remove(self._below[what, part])
            self._below[what, part] += 1

    def __contains__(self, value: Value) -> bool:
        what, part, i = value
        return i < self._below[what, part] or i in self._beyond[what, part]


class DeadlockError(InputError):
    """Every worker that is not done waits for another."""


def needs(action: Action, dependencies: Dependencies) -> tuple[Value, ...]:
    """What must be there before an action can begin.

    >>> needs(Action(1, "forward", 3), Dependencies.chain(4))
    (('activations', 0, 3),)
    >>> needs(Action(1, "backward", 3), Dependencies.chain(4))
    (('activations', 1, 3), ('gradient', 2, 3))
    """
    part, i = action.stage, action.micro_batch
    match action.kind:
        case "forward":
            return tuple(("activations", source, i) for source in dependencies.sources(part))
        case "backward" | "backward_input":
            own: Value = ("activations", part, i)
            return (own, *(("gradient", consumer, i) for consumer in dependencies.returning(part)))
        case "backward_weight":
            return (("gradient", part, i),)
        case "update":
            return (("weights' gradient", part, i),)


def makes(action: Action) -> tuple[Value, ...]:
    """What is there when an action has ended.

    >>> makes(Action(1, "backward", 3))
    (('gradient', 1, 3), ("weights' gradient", 1, 3))
    """
    part, i = action.stage, action.micro_batch
    match action.kind:
        case "forward":
            return (("activations", part, i),)
        case "backward":
            return ("gradient", part, i), ("weights' gradient", part, i)
        case "backward_input":
            return (("gradient", part, i),)
        case "backward_weight":
            return (("weights' gradient", part, i),)
        case "update":
            return ()


def walk(orders: Sequence[Iterator[Action]], dependencies: Dependencies) -> Iterator[tuple[int, Action]]:
    """(worker, action) of all workers, each worker's in its own order and none before what it needs.

    However long the orders are, no more is taken of them, and kept, than what is given out.

    Raises:
        DeadlockError: nobody can go on; it says what each waits for.
    """
    made = Made()
    heads = [next(order, None) for order in orders]
    while any(heads):
        moved = False
        for worker, order in enumerate(orders):
            while (head := heads[worker]) and all(value in made for value in needs(head, dependencies)):
                yield worker, head
                for value in makes(head):
                    made.add(value)
                heads[worker], moved = next(order, None), True
        if not moved:
            raise _deadlock(heads, made, dependencies)


def _deadlock(heads: Sequence[Action | None], made: Made, dependencies: Dependencies) -> DeadlockError:
    waits = []
    for worker, head in enumerate(heads):
        if head is not None:
            what, part, i = next(value for value in needs(head, dependencies) if value not in made)
            waits.append(f"worker {worker} with {head} for the {what} of micro-batch {i} from part {part}")
    return DeadlockError(f"nobody can go on: {'; '.join(waits)} wait; write an order in which one of them comes first.")


_CHANGES: dict[Kind, int] = {"forward": 1, "backward": -1, "backward_weight": -1}


def check(schedule: Schedule, workers: int, micro_batches: int, left_out: Collection[int] = ()) -> str | None:
    """The first problem of a schedule; None: each part does all that it must once, and nobody waits for ever.

    Args:
        schedule: any.
        workers: p.
        micro_batches: m, or the length of the stream.
        left_out: micro-batches that the batch was too small for.

    >>> from paceline.schedule import parse
    >>> check(parse("1f1b"), 4, 8)
    """
    orders = [
        [action for action in schedule.actions(worker, workers, micro_batches) if action.micro_batch not in left_out]
        for worker in range(workers)
    ]
    kept = [i for i in range(micro_batches) if i not in left_out]
    for worker, order in enumerate(orders):
        if problem := _miscounted(order, _expected(schedule, worker, workers, kept), schedule.flushes):
            return f"worker {worker} {problem}"
    return _stuck(orders, schedule.parts(workers))


def _expected(schedule: Schedule, worker: int, workers: int, kept: Iterable[int]) -> Iterator[Action]:
    kinds: tuple[Kind, ...] = ("forward", "backward")
    if schedule.splits_backward:
        kinds = ("forward", "backward_input", "backward_weight")
    own = [part for part in range(schedule.parts(workers)) if schedule.worker_of(part, workers) == worker]
    return (Action(part, kind, i) for i in kept for part in own for kind in kinds)


def _miscounted(order: Sequence[Action], expected: Iterable[Action], flushes: bool) -> str | None:
    times, due = Counter(order), dict.fromkeys(expected)
    for action in due:
        if action not in times:
            return f"never does {action}"
    for action, count in times.items():
        allowed = action in due or (action.kind == "update" and not flushes)
        if count > 1 or not allowed:
            return f"does {action} {'more than once' if allowed else 'and should not'}"
    return None


def _stuck(orders: Iterable[Sequence[Action]], parts: int) -> str | None:
    try:
        for _ in walk([iter(order) for order in orders], Dependencies.chain(parts)):
            pass
    except DeadlockError as error:
        return str(error)
    return None


def _order(
    schedule: Schedule, worker: int, workers: int, micro_batches: int, columns: StageReplicas | None
) -> Iterator[Action]:
    if columns is None or max(columns.copies) == 1:
        return schedule.actions(worker, workers, micro_batches)
    return schedule.column(StageReplica(worker, 0), columns, micro_batches)


def in_flight(
    schedule: Schedule, worker: int, workers: int, micro_batches: int, columns: StageReplicas | None = None
) -> int:
    """The most activations that a worker holds at once: forwards whose backward, both halves, is not yet done.

    Those of each part count by themselves. Where columns take turns at its stage, of the first of them.

    >>> from paceline.schedule import parse
    >>> [in_flight(parse("1f1b"), worker, 4, 64) for worker in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(parse("1f1b"), worker, 2, 64, StageReplicas((3, 1))) for worker in range(2)]
    [2, 1]
    """
    held = most = 0
    for action in _order(schedule, worker, workers, micro_batches, columns):
        held += _CHANGES.get(action.kind, 0)
        most = max(most, held)
    return most
