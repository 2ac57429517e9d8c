"""What an option may be: each check raises InputError with the value, the rule and a line that keeps it.

``name`` is what stands before the ``=`` in the text form, so that the line in the message can be written as it is.
"""

import math
from collections.abc import Callable, Iterable
from typing import TypeGuard

from paceline.core.errors import InputError, unknown


def whole(name: str, value: object, *, least: int) -> None:
    """``value`` must be an int of at least ``least``.

    >>> whole("buffered:k", 0, least=1)
    Traceback (most recent call last):
    paceline.core.errors.InputError: buffered:k=0, but it must be a whole number of at least 1; write buffered:k=1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refused(name, value, f"a whole number of at least {least}", least)


def positive(name: str, value: object, *, instead: float) -> None:
    """``value`` must be a finite number above 0; ``instead`` is what the message proposes."""
    number(name, value, "above 0", lambda v: v > 0, instead=instead)


def number(name: str, value: object, rule: str, holds: Callable[[float], bool], *, instead: float) -> None:
    """``value`` must be a finite number for which ``holds``; ``rule`` says so in words."""
    if not _is_number(value) or not holds(value):
        raise _refused(name, value, f"a number {rule}", instead)


def flag(name: str, value: object) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false", "true")


def choice(name: str, value: object, choices: Iterable[str]) -> None:
    """``value`` must be one of the names; the error names the nearest."""
    known = tuple(choices)
    if value not in known:
        raise unknown(name, str(value), known)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refused(name: str, value: object, rule: str, instead: object) -> InputError:
    return InputError(f"{name}={value}, but it must be {rule}; write {name}={instead}.")
