"""One row of the table of support: a combination that does not run, with the sentence to show."""

from collections.abc import Callable
from typing import NamedTuple

from paceline.core.delta import InPlace
from paceline.support.case import Case


class Row(NamedTuple):
    """One combination that is not supported."""

    applies: Callable[[Case], bool]
    sentence: str
    """The values, the rule, and the line to write instead, as a template: ``{s.shards}`` is a field of the strategy."""
    feature: str = ""
    """The feature of which the sentence shows ``{value}``, or ``{engines}`` that support it."""


def used(c: Case, field: str) -> bool:
    """Return whether an optional field of the strategy is set."""
    return getattr(c, field) not in (None, False, "none")


def in_place(c: Case) -> bool:
    """Return True if replicas write one A."""
    return isinstance(c.policy.delta, InPlace)


def real(c: Case) -> bool:
    """Return True if workers really run: in virtual time one process computes their results."""
    return "virtual-time" not in c.features
