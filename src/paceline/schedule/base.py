"""What a schedule is: the order in which the workers of a pipeline go through the micro-batches of a mini-batch.

A model cut into parts runs on p workers; worker w holds part w or, where parts are interleaved, parts w, w + p, ....
Forward of micro-batch i needs part j - 1 to have made it, backward needs part j + 1's (and both in a part are apart).

One forward, one backward: the alternation that several schedules are made of.

Schedules as text: ``1f1b``, ``interleaved:chunks=4``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from paceline.core.checks import check_int
from paceline.core.errors import InputError
from paceline.core.mesh import StageReplica, StageReplicas
from paceline.core.registry import declare, registered
from paceline.core.text_form import parse_option, text_of

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

    def column(self, column: StageReplica, columns: StageReplicas, micro_batches: int) -> Iterator[Action]:
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
    check_int("stages", workers, least=1)
    check_int("micro_batches", micro_batches, least=1)


def alternate(ahead: int, count: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """``ahead`` forwards, then one forward and one backward by turns, then the backwards that are left.

    Args:
        ahead: by how many the forwards lead.
        count: how many there are of each; however many, nothing is kept.

    >>> " ".join(f"{kind[0]}{k}" for kind, k in alternate(2, 4))
    'f0 f1 f2 b0 f3 b1 b2 b3'
    """
    for k in range(ahead + count):
        if k < count:
            yield "forward", k
        if k >= ahead:
            yield "backward", k - ahead


def names() -> tuple[str, ...]:
    """Every registered name, sorted.

    >>> names()[:3]
    ('1f1b', 'gpipe', 'interleaved')
    """
    return tuple(sorted(registered(Schedule)))


def parse(text: str) -> Schedule:
    """The schedule that a text says.

    Raises:
        InputError: an unknown schedule or option, with the nearest name; a value out of its range.

    >>> parse("interleaved:chunks=4")
    Interleaved(chunks=4)
    """
    schedule: Schedule = parse_option("schedule", Schedule, text)
    return schedule


def canonical(text: Any) -> str:
    """The text of the same schedule that has only what differs from the defaults.

    >>> canonical("interleaved:chunks=2"), canonical("interleaved:chunks=3")
    ('interleaved', 'interleaved:chunks=3')
    """
    if not isinstance(text, str):
        raise InputError(f"schedule={text!r} is no text; write schedule='1f1b', or schedule='interleaved:chunks=2'.")
    return text_of(parse(text))
