"""What a schedule is: the order in which the workers of a pipeline go through the micro-batches of a mini-batch.

A model cut into parts runs on p workers; worker w holds part w or, where parts are interleaved, parts w, w + p, ....
Forward of micro-batch i needs part j - 1 to have made it, backward needs part j + 1's (and both in a part are apart).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from paceline.aggregation.checks import whole
from paceline.aggregation.registry import declare
from paceline.core.columns import Column, Columns
from paceline.core.errors import InputError

Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight", "update"]
"""What is done with a micro-batch; ``backward`` is ``backward_input`` and ``backward_weight`` in one."""

LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "update": "U",
}

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_FORM = re.compile(r"(\d+)([A-Z])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a worker does.

    >>> print(Action(2, "forward", 0)), Action.parse("1B3")
    2F0
    (None, Action(stage=1, kind='backward', micro_batch=3))
    """

    stage: int
    """Which part of the model."""
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that is printed so."""
        found = _FORM.fullmatch(text)
        if found is None or found[2] not in _KINDS:
            raise InputError(f"{text!r} is no action; write a stage, one of {', '.join(_KINDS)}, a micro-batch: 2F0")
        return cls(int(found[1]), _KINDS[found[2]], int(found[3]))


@declare("schedule")
class Schedule(ABC):
    """How the workers of a pipeline go through a mini-batch: a small immutable value. Subclasses are registered.

    All that an action needs of others is of its own micro-batch; so the order stays valid when every action of some
    micro-batches is left out, as a batch that is too small for m of them does.
    """

    flushes: ClassVar[bool] = True
    """Whether weights stay as they are from the first forward of a mini-batch to its last backward."""

    updates_each: ClassVar[bool] = False
    """Whether each micro-batch is an update of its own: then a batch is one."""

    splits_backward: ClassVar[bool] = False
    """Whether gradients of inputs and of weights are computed apart."""

    @property
    def chunks(self) -> int:
        """Parts of the model that each worker holds."""
        return 1

    def parts(self, workers: int) -> int:
        """Into how many parts the model is cut."""
        return workers * self.chunks

    def worker_of(self, part: int, workers: int) -> int:
        """Who holds a part."""
        return part % workers

    @property
    def takes_turns(self) -> bool:
        """Whether several columns may take turns at a stage."""
        return self.flushes and not self.splits_backward and self.chunks == 1

    def column(self, column: Column, columns: Columns, micro_batches: int) -> Iterator[Action]:
        """What one of those does who take turns at a stage, in its order: what one worker would, of its micro-batches.

        Args:
            column: of a stage and its copies.
            columns: of all stages.
            micro_batches: m, of one mini-batch.
        """
        mine = columns.number(column)
        for action in self.actions(column.stage, len(columns.copies), micro_batches):
            if columns.of(column.stage, action.micro_batch) == mine:
                yield action

    def resolved(self, micro_batches: int) -> "Schedule":
        """With m, the micro-batches of one mini-batch, filled in where a stream of several of them depends on it."""
        del micro_batches
        return self

    def version(self, micro_batch: int, worker: int, workers: int) -> int:
        """How many updates the weights have had with which a micro-batch goes forward and backward on a worker.

        Counted from the start of what :meth:`actions` covers; both passes use the same weights.
        """
        del micro_batch, worker, workers
        return 0

    @abstractmethod
    def refuse(self, workers: int, micro_batches: int) -> None:
        """Raise InputError where it can't be had with so many."""

    @abstractmethod
    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        """What one worker does, in its order.

        Args:
            worker: 0 to p - 1.
            workers: p.
            micro_batches: m, of one mini-batch; where weights don't wait for its end, of the whole stream.
        """


def refuse_less_than_one(workers: int, micro_batches: int) -> None:
    """What no schedule can do."""
    whole("stages", workers, least=1)
    whole("micro_batches", micro_batches, least=1)
