"""Checks of single options: each raises InputError with the value, the rule and a line that keeps it.

``name`` is what stands before the ``=`` in the text form, so that the line in the message can be written as it is.
"""

import math
from collections.abc import Callable, Iterable

from paceline.core.errors import InputError, unknown


def check_int(name: str, value: object, *, least: int) -> None:
    """Require an int of at least ``least``.

    >>> check_int("buffered:k", 0, least=1)
    Traceback (most recent call last):
    paceline.core.errors.InputError: buffered:k=0, but it must be a whole number of at least 1; write buffered:k=1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"a whole number of at least {least}"
        raise InputError(f"{name}={value}, but it must be {rule}; write {name}={least}.")


def check_number(name: str, value: object, rule: str, holds: Callable[[float], bool], *, instead: float) -> None:
    """Require a finite number for which ``holds``; ``rule`` is that in words, ``instead`` what the message proposes."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not holds(value):  # type: ignore[arg-type]  # a number, as just checked
        raise InputError(f"{name}={value}, but it must be a number {rule}; write {name}={instead}.")


def check_positive(name: str, value: object, *, instead: float) -> None:
    """Require a finite number above 0."""
    check_number(name, value, "above 0", lambda v: v > 0, instead=instead)


def check_bool(name: str, value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value}, but it must be true or false; write {name}=true.")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Require one of the names; the error proposes the nearest."""
    known = tuple(choices)
    if value not in known:
        raise unknown(name, str(value), known)
