"""The contract of schedules: the order in which the workers of a pipeline process the micro-batches of a mini-batch.

A model cut into parts runs on p workers; worker w holds part w or, if parts are interleaved, parts w, w + p, ....
Forward of micro-batch i needs the output of part j - 1, backward needs the gradient of part j + 1 (and both in a part
need each other). As text: ``1f1b``, ``interleaved:chunks=4``.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from paceline.core.errors import InputError, check_int
from paceline.core.mesh import StageReplica, StageReplicas
from paceline.core.registry import declare, registered
from paceline.core.text_form import parse_option, text_of
from paceline.core.types import Seconds

# Kinds of work on a micro-batch; backward is backward_input and backward_weight in one.
Kind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight", "update"]

LETTERS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "update": "U",
}

# Forward passes of a part that take no longer than this are mostly Python and autograd, so on a CPU they run as a list
# of operators.
SHORT_PASS_S: Seconds = 0.01

_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_FORM = re.compile(r"(\d+)([A-Z])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a worker.

    >>> print(Action(2, "forward", 0)), Action.parse("1B3")
    2F0
    (None, Action(stage=1, kind='backward', micro_batch=3))
    """

    stage: int
    """Number of the part of the model."""
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that is printed so."""
        match = _FORM.fullmatch(text)
        if match is None or match[2] not in _KINDS:
            raise InputError(f"{text!r} is no action; write a stage, one of {', '.join(_KINDS)}, a micro-batch: 2F0")
        return cls(int(match[1]), _KINDS[match[2]], int(match[3]))


@declare("schedule")
class Schedule(ABC):
    """Order in which the workers of a pipeline process a mini-batch, as a value. Subclasses are registered.

    All that an action needs of others belongs to its own micro-batch; so the order stays valid if every action of some
    micro-batches is left out, as for a batch that is too small for m of them.
    """

    flushes: ClassVar[bool] = True
    """Whether weights stay as they are from the first forward of a mini-batch to its last backward."""

    updates_each: ClassVar[bool] = False
    """Whether each micro-batch is an update of its own: then a batch is one."""

    splits_backward: ClassVar[bool] = False
    """Whether gradients of inputs and of weights are computed separately."""

    @property
    def chunks(self) -> int:
        """Number of parts of the model that each worker holds."""
        return 1

    def parts(self, workers: int) -> int:
        """Return the number of parts of the model."""
        return workers * self.chunks

    def worker_of(self, part: int, workers: int) -> int:
        """Return the worker that holds a part."""
        return part % workers

    @property
    def allows_stage_replicas(self) -> bool:
        """True if stages may be replicated, their replicas taking the micro-batches in turn."""
        return self.flushes and not self.splits_backward and self.chunks == 1

    def stage_replica_actions(
        self, replica: StageReplica, stage_replicas: StageReplicas, micro_batches: int
    ) -> Iterator[Action]:
        """Yield the actions of one stage replica in its order: those of a single worker, of its own micro-batches.

        Args:
            replica: of a stage.
            stage_replicas: of all stages.
            micro_batches: m, of one mini-batch.
        """
        own = stage_replicas.number(replica)
        for action in self.actions(replica.stage, len(stage_replicas.copies), micro_batches):
            if stage_replicas.processing(replica.stage, action.micro_batch) == own:
                yield action

    def orders(
        self, workers: int, micro_batches: int, stage_replicas: StageReplicas | None = None
    ) -> list[Iterator[Action]]:
        """Return the actions of every worker or, if stages are replicated, of every stage replica; lazily."""
        if stage_replicas is None or max(stage_replicas.copies) == 1:
            return [self.actions(worker, workers, micro_batches) for worker in range(workers)]
        return [self.stage_replica_actions(each, stage_replicas, micro_batches) for each in stage_replicas]

    def resolved(self, micro_batches: int) -> "Schedule":
        """Return the schedule with m, the micro-batches of a mini-batch, filled in if a stream depends on it."""
        del micro_batches
        return self

    def version(self, micro_batch: int, worker: int, workers: int) -> int:
        """Return the number of updates of the weights that a worker uses for a micro-batch, forward and backward.

        Counted from the start of what :meth:`actions` covers.
        """
        del micro_batch, worker, workers
        return 0

    def refuse(self, workers: int, micro_batches: int) -> None:
        """Raise InputError if the schedule does not exist for these numbers."""
        check_int("stages", workers, least=1)
        check_int("micro_batches", micro_batches, least=1)

    @abstractmethod
    def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
        """Yield the actions of one worker, in its order.

        Args:
            worker: 0 to p - 1.
            workers: p.
            micro_batches: m, of one mini-batch; of the whole stream if weights don't wait for the mini-batch's end.
        """


def alternate(ahead: int, count: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield ``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Args:
        ahead: the lead of the forwards.
        count: of each; however many, nothing is stored.

    >>> " ".join(f"{kind[0]}{k}" for kind, k in alternate(2, 4))
    'f0 f1 f2 b0 f3 b1 b2 b3'
    """
    for k in range(ahead + count):
        if k < count:
            yield "forward", k
        if k >= ahead:
            yield "backward", k - ahead


def names() -> tuple[str, ...]:
    """Return every registered name, sorted.

    >>> names()[:3]
    ('1f1b', 'gpipe', 'interleaved')
    """
    return tuple(sorted(registered(Schedule)))


def parse(text: str) -> Schedule:
    """Return the schedule that a text says.

    Raises:
        InputError: an unknown schedule or option, with the nearest name; a value out of its range.

    >>> parse("interleaved:chunks=4")
    Interleaved(chunks=4)
    """
    schedule: Schedule = parse_option("schedule", Schedule, text)
    return schedule


def canonical(text: Any) -> str:
    """Return the text of the same schedule that has only what differs from the defaults.

    >>> canonical("interleaved:chunks=2"), canonical("interleaved:chunks=3")
    ('interleaved', 'interleaved:chunks=3')
    """
    if not isinstance(text, str):
        raise InputError(f"schedule={text!r} is no text; write schedule='1f1b', or schedule='interleaved:chunks=2'.")
    return text_of(parse(text))
