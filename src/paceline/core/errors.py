"""Every error that Paceline raises on purpose, and checks of options that raise InputError.

Checks of single options: each raises InputError with the value, the rule and a line that keeps it.

``name`` is what stands before the ``=`` in the text form, so that the line in the message can be written as it is.
"""

import json
import math
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import Any

from paceline.core.types import ReplicaId

# Number of the scorer in messages, where replicas have theirs.
SCORER = -1

# Characters of a traceback that are sent to main, at most six bytes each: one message must hold them.
LONGEST_TRACEBACK = 20_000

# What the file names of frames begin with that are not the user's.
_NOT_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")


class PacelineError(Exception):
    """The root: ``except PacelineError`` catches all that Paceline refuses or reports."""


class InputError(PacelineError, ValueError):
    """What the user wrote can't be done as written; nothing has been started."""


class NonFiniteError(PacelineError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class WorkerError(PacelineError, RuntimeError):
    """A worker failed; has its coordinates and its own traceback."""


class CallbackError(PacelineError, RuntimeError):
    """A callback of the user's failed, in the process that calls it; no worker did."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks did not make the same call, or one of them has exited; every rank of the group raises the same error."""


class WaitTimeoutError(PacelineError, TimeoutError):
    """A wait exceeded its timeout; the message names the waiting process and the one that it waited for."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not known, with the nearest one that is.

    >>> str(unknown("policy", "asynchronos", ["synchronous", "asynchronous"]))
    "unknown policy 'asynchronos'; did you mean 'asynchronous'? Known: asynchronous, synchronous."
    >>> str(unknown("policy", "fast", ["synchronous"]))
    "unknown policy 'fast'; known: synchronous."
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    return InputError(f"unknown {kind} {name!r}; {hint}: {', '.join(names) or 'none'}.")


def encode_failure(process: ReplicaId | str, error: BaseException) -> bytes:
    """Encode an error as a message to the main process.

    Args:
        process: the replica, with its worker where it has several, or :data:`SCORER`.
        error: what was raised.
    """
    text = traceback_text(error)[-LONGEST_TRACEBACK:]
    summary = traceback.format_exception_only(error)[-1].strip()[:1000]
    refused = {"refused": refusal_text(error)} if isinstance(error, InputError) else {}
    return json.dumps({"failed": process, "what": summary, "traceback": text, **refused}).encode()


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error from the user's first frame on, or all of it where none is the user's.

    The frames before are Paceline's, and torch's that call the user's module; those after may have raised the error.
    """
    whole = TracebackException.from_exception(error)
    for each in _chain(whole):
        users = (number for number, frame in enumerate(each.stack) if _is_users(frame))
        del each.stack[: next(users, 0)]
    return "".join(whole.format())


def refusal_text(error: InputError) -> str:
    """Return the text of a refusal in a worker, with the line of the user's code that has met it, if any has."""
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame)]
    return "\n".join([str(error), *(line.rstrip() for line in traceback.format_list(users[-1:]))])


def drop_engines_frames(error: BaseException) -> None:
    """Forget the frames by which a worker's failure has come up to here, unless the user's own are among them.

    Its text has where it was raised. The environment's ``PACELINE_TRACEBACK=1`` keeps them.
    """
    ours = not any(map(_is_users, traceback.extract_tb(error.__traceback__)))
    if isinstance(error, (InputError, WorkerError)) and ours and os.environ.get("PACELINE_TRACEBACK") != "1":
        error.__traceback__ = None


def _chain(error: TracebackException | None) -> Iterator[TracebackException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_installed(filename: str) -> bool:
    """Return whether a file is a part of an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


def _is_users(frame: FrameSummary) -> bool:
    return not is_installed(frame.filename) and not frame.filename.startswith(_NOT_USERS)


def failure_text(message: dict[str, Any]) -> str:
    """Return the text of a worker's failure: its coordinates, the error, its own traceback.

    >>> failure_text(json.loads(encode_failure(2, KeyError("x")))).splitlines()[0]
    "replica 2 failed: KeyError: 'x'"
    """
    process = "the scorer" if message["failed"] == SCORER else f"replica {message['failed']}"
    return f"{process} failed: {message['what']}\n\n{message['traceback']}"


def failure_of(message: dict[str, Any]) -> "PacelineError":
    """Return the error that a worker's message tells: one of ours by kind and text, or a failure of the user's code."""
    if "refused" in message:
        return InputError(message["refused"])
    if "said" in message:
        kind: type[PacelineError] = globals().get(message["kind"], WorkerError)
        return kind(message["said"])
    return WorkerError(failure_text(message))


def raised_text(message: dict[str, Any]) -> str:
    """Return in a few words what a worker has met, for the account of the run."""
    return f"raised {message['what']}" if "what" in message else str(message["said"]).partition("\n")[0]


def kind_and_text(process: ReplicaId | str, error: BaseException) -> tuple[str, str]:
    """Return the class name and text of one of our errors; any other becomes a worker's failure."""
    if isinstance(error, PacelineError):
        return type(error).__name__, refusal_text(error) if isinstance(error, InputError) else str(error)
    return WorkerError.__name__, failure_text(json.loads(encode_failure(process, error)))


def check_int(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Require an int of at least ``least``, and at most ``most``.

    >>> check_int("buffered:k", 0, least=1)
    Traceback (most recent call last):
    paceline.core.errors.InputError: buffered:k=0, but it must be a whole number of at least 1; write buffered:k=1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"a whole number of at least {least}"
        raise InputError(f"{name}={value}, but it must be {rule}; write {name}={least}.")
    if most is not None and value > most:
        raise InputError(f"{name}={value}, but it can be {most:,} at most; write {name}={most} or less.")


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
