"""Numbers and ``key=value`` words, as distributions, delays and times are written."""

import math
from collections.abc import Iterable

from paceline.core.errors import InputError


def number(text: str, where: str) -> float:
    """The number that ``text`` is.

    Raises:
        InputError: no number, infinite or not a number; ``where`` says which value was meant.
    """
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}={text!r} is no number; write {where}=0.1, say.") from None
    return finite(value, where)


def finite(value: float, where: str) -> float:
    """``value``, if it is finite."""
    if not math.isfinite(value):
        raise InputError(f"{where}={value} is not finite; write {where}=0.1, say.")
    return value


def at_least(least: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or lies below ``least``."""
    if finite(value, where) < least:
        raise InputError(f"{where}={show(value)}, but it must be {show(least)} or more; write {where}={show(least)}.")


def at_most(most: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or lies above ``most``."""
    if finite(value, where) > most:
        raise InputError(f"{where}={show(value)}, but it must be {show(most)} or less; write {where}={show(most)}.")


def above(bound: float, value: float, where: str) -> None:
    """Refuse a value that is not finite or not above ``bound``."""
    if finite(value, where) <= bound:
        raise InputError(f"{where}={show(value)}, but it must be above {show(bound)}; write {where}=0.1, say.")


def show(value: float) -> str:
    """The shortest text that reads back as ``value``.

    >>> show(2.0), show(0.1)
    ('2', '0.1')
    """
    return repr(float(value)).removesuffix(".0")


def pairs(words: Iterable[str], where: str, example: str) -> dict[str, str]:
    """The keys and values of ``key=value`` words.

    >>> pairs(["mean=0", "std=1"], "normal", "normal:mean=0,std=1")
    {'mean': '0', 'std': '1'}
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise InputError(f"{where}: {word!r} is not key=value; write {example}.")
        if key in found:
            raise InputError(f"{where}: {key} is given twice, {found[key]} and {value}; write {key}={value} alone.")
        found[key] = value
    return found
