"""What must hold for every schedule, and what its activations cost."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from paceline.core.columns import Column, Columns
from paceline.schedule.base import Action, Kind, Schedule
from paceline.schedule.dependencies import Dependencies
from paceline.schedule.walk import DeadlockError, walk

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
    schedule: Schedule, worker: int, workers: int, micro_batches: int, columns: Columns | None
) -> Iterator[Action]:
    if columns is None or max(columns.copies) == 1:
        return schedule.actions(worker, workers, micro_batches)
    return schedule.column(Column(worker, 0), columns, micro_batches)


def in_flight(schedule: Schedule, worker: int, workers: int, micro_batches: int, columns: Columns | None = None) -> int:
    """The most activations that a worker holds at once: forwards whose backward, both halves, is not yet done.

    Those of each part count by themselves. Where columns take turns at its stage, of the first of them.

    >>> from paceline.schedule import parse
    >>> [in_flight(parse("1f1b"), worker, 4, 64) for worker in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(parse("1f1b"), worker, 2, 64, Columns((3, 1))) for worker in range(2)]
    [2, 1]
    """
    held = most = 0
    for action in _order(schedule, worker, workers, micro_batches, columns):
        held += _CHANGES.get(action.kind, 0)
        most = max(most, held)
    return most
