"""Schedules as text: ``1f1b``, ``interleaved:chunks=4``."""

from typing import Any

from paceline.aggregation.registry import registered
from paceline.aggregation.text import read, text_of
from paceline.core.errors import InputError
from paceline.schedule.base import Schedule


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
    schedule: Schedule = read("schedule", Schedule, text)
    return schedule


def canonical(text: Any) -> str:
    """The text of the same schedule that has only what differs from the defaults.

    >>> canonical("interleaved:chunks=2"), canonical("interleaved:chunks=3")
    ('interleaved', 'interleaved:chunks=3')
    """
    if not isinstance(text, str):
        raise InputError(f"schedule={text!r} is no text; write schedule='1f1b', or schedule='interleaved:chunks=2'.")
    return text_of(parse(text))
