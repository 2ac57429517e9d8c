"""Errors raised in another process, as the caller sees them.

What is said of a Δ that is not finite.
"""

import json
import traceback
from typing import Any

from paceline.core.errors import NonFiniteError, PacelineError, WorkerError
from paceline.core.types import Clock, ReplicaId

SCORER = -1
"""The scorer's number in messages, where replicas have theirs."""

LONGEST_TRACEBACK = 20_000
"""Characters that are sent to main, at most six bytes each: one message must hold them."""


def failure(who: ReplicaId | str, error: BaseException) -> bytes:
    """The message that tells main of an error.

    Args:
        who: the replica, and its worker where it has several, or :data:`SCORER`.
        error: what was raised.
    """
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    what = traceback.format_exception_only(error)[-1].strip()[:1000]
    return json.dumps({"failed": who, "what": what, "traceback": text}).encode()


def worker_failed(message: dict[str, Any]) -> str:
    """The text of a worker's failure: coordinates, the error, its own traceback.

    >>> worker_failed(json.loads(failure(2, KeyError("x")))).splitlines()[0]
    "replica 2 failed: KeyError: 'x'"
    """
    who = "the scorer" if message["failed"] == SCORER else f"replica {message['failed']}"
    return f"{who} failed: {message['what']}\n\n{message['traceback']}"


def kind_and_text(who: ReplicaId | str, error: BaseException) -> tuple[str, str]:
    """The class of an error that is ours, by name, and its text; anything else is a worker's failure."""
    if isinstance(error, PacelineError):
        return type(error).__name__, str(error)
    return WorkerError.__name__, worker_failed(json.loads(failure(who, error)))


def not_finite(loss: float, replica: ReplicaId, clock: Clock) -> NonFiniteError:
    """The error that ends a run where nothing is to be skipped."""
    return NonFiniteError(
        f"the Δ of replica {replica} at its step {clock} is not finite (loss {loss:g}); lower the learning rate, set "
        "clip_norm=, or write on_nonfinite='skip' to discard such Δs and count them"
    )
