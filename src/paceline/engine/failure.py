"""How what the user's code raised in another process reaches the caller."""

import json
import traceback
from typing import Any

from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import ReplicaId

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
