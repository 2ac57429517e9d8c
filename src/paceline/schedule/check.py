"""A topological order of a schedule's actions, checks that hold for every schedule, and its activation memory."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, TypeAlias

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplica, StageReplicas
from paceline.schedule.base import Action, Kind, Schedule
from paceline.schedule.dependencies import Dependencies

# A result: its kind, the part that makes it, the micro-batch.
Value: TypeAlias = tuple[Literal["activations", "gradient", "weights' gradient"], int, int]


class Made:
    """Set of values. Those that a part makes in ascending order are only counted, for streams may be long."""

    def __init__(self) -> None:
        self._below: dict[tuple[str, int], int] = defaultdict(int)
        self._beyond: dict[tuple[str, int], set[int]] = defaultdict(set)

    def add(self, value: Value) -> None:
        """Add a value."""
        what, part, i = value
        beyond = self._beyond[what, part]
        beyond.add(i)
        # Move what is now contiguous from the set into the count.
        while self._below[what, part] in beyond:
            beyond.remove(self._below[what, part])
            self._below[what, part] += 1

    def __contains__(self, value: Value) -> bool:
        what, part, i = value
        return i < self._below[what, part] or i in self._beyond[what, part]


class DeadlockError(InputError):
    """Every worker that is not done waits for another."""


def needs(action: Action, dependencies: Dependencies) -> tuple[Value, ...]:
    """Return the values that an action needs before it can begin.

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
    """Return the values that exist when an action has ended.

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
    """Yield (worker, action) of all workers, each worker's in its own order and none before what it needs.

    However long the orders are, no more is taken from them, and stored, than what is yielded.

    Raises:
        DeadlockError: no worker can go on; it says what each waits for.
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
        if moved:
            continue
        waits = []
        for worker, head in enumerate(heads):
            if head is not None:
                what, part, i = next(value for value in needs(head, dependencies) if value not in made)
                waits.append(f"worker {worker} with {head} for the {what} of micro-batch {i} from part {part}")
        raise DeadlockError(
            f"no worker can go on: {'; '.join(waits)} wait; write an order in which one of them comes first."
        )


def check(schedule: Schedule, workers: int, micro_batches: int, left_out: Collection[int] = ()) -> str | None:
    """Return the first problem of a schedule; None if each part does all its work once and no worker waits for ever.

    Args:
        schedule: any.
        workers: p.
        micro_batches: m, or the length of the stream.
        left_out: micro-batches that the batch was too small for.

    >>> from paceline.schedule import parse
    >>> check(parse("1f1b"), 4, 8)
    """
    kinds: tuple[Kind, ...] = ("forward", "backward")
    if schedule.splits_backward:
        kinds = ("forward", "backward_input", "backward_weight")
    orders = [
        [action for action in order if action.micro_batch not in left_out]
        for order in schedule.orders(workers, micro_batches)
    ]
    for worker, order in enumerate(orders):
        own = [part for part in range(schedule.parts(workers)) if schedule.worker_of(part, workers) == worker]
        batches = (i for i in range(micro_batches) if i not in left_out)
        due = dict.fromkeys(Action(part, kind, i) for i in batches for part in own for kind in kinds)
        times = Counter(order)
        for action in due:
            if action not in times:
                return f"worker {worker} never does {action}"
        for action, count in times.items():
            allowed = action in due or (action.kind == "update" and not schedule.flushes)
            if count > 1 or not allowed:
                return f"worker {worker} does {action} {'more than once' if allowed else 'and should not'}"
    try:
        for _ in walk([iter(order) for order in orders], Dependencies.chain(schedule.parts(workers))):
            pass
    except DeadlockError as error:
        return str(error)
    return None


def in_flight(
    schedule: Schedule, worker: int, workers: int, micro_batches: int, stage_replicas: StageReplicas | None = None
) -> int:
    """Return the most activations that a worker holds at once: forwards without a complete backward, of both halves.

    Those of each part count separately. If its stage is replicated, the figure is that of the first replica.

    >>> from paceline.schedule import parse
    >>> [in_flight(parse("1f1b"), worker, 4, 64) for worker in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(parse("1f1b"), worker, 2, 64, StageReplicas((3, 1))) for worker in range(2)]
    [2, 1]
    """
    number = stage_replicas.number(StageReplica(worker, 0)) if stage_replicas else worker
    held = most = 0
    for action in schedule.orders(workers, micro_batches, stage_replicas)[number]:
        if action.kind == "forward":
            held += 1
            most = max(most, held)
        elif action.kind in ("backward", "backward_weight"):
            held -= 1
    return most
