"""Every error that Paceline raises on purpose.

A message gives the values, the rule they break, and the line to write instead.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PacelineError(Exception):
    """The root: ``except PacelineError`` catches all that Paceline refuses or reports."""


class InputError(PacelineError, ValueError):
    """What the user wrote can't be done as written; nothing has been started."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class WorkerError(PacelineError, RuntimeError):
    """A worker failed; carries its coordinates and its own traceback."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks did not make the same call, or one of them has gone; every rank of the group is told the same."""


class WaitTimeoutError(PacelineError, TimeoutError):
    """A wait outlasted its bound; the message names who waited for whom."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not known, with the nearest one that is.

    >>> str(unknown("policy", "asynchronos", ["synchronous", "asynchronous"]))
    "unknown policy 'asynchronos'; did you mean 'asynchronous'? Known: asynchronous, synchronous."
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"unknown {kind} {name!r}; {hint}Known: {', '.join(names) or 'none'}.")
