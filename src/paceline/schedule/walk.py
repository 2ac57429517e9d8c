"""What an action needs, and one order in which all workers get through theirs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from paceline.core.errors import InputError
from paceline.schedule.base import Action
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
