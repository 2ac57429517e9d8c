"""Plans that divide a step the same way are of one kind, whatever their sizes."""

from typing import NamedTuple

from paceline.plan.base import Arrangement, Recomputed
from paceline.plan.searching.candidates import Frame, Option


class Kind(NamedTuple):
    """What is said of a plan without numbers."""

    staged: bool
    sharded: bool
    turning: bool
    """Whether several take turns at a stage."""
    schedule: str
    recompute: Recomputed
    divided: int
    """ZeRO's number."""


def kind_of(a: Arrangement) -> Kind:
    """Of an arrangement.

    >>> kind_of(Arrangement(8, stages=4, micro_batches=8)) == kind_of(Arrangement(2, stages=16, micro_batches=64))
    True
    """
    return Kind(a.stages > 1, a.shards > 1, bool(a.copies), a.schedule, a.recompute, a.divided)


def kind(frame: Frame, option: Option) -> Kind:
    """Of what is not made into an arrangement yet."""
    made = option.schedule, option.recompute, option.divided
    return Kind(frame.stages > 1, frame.shards > 1, bool(frame.copies), *made)
