"""Moments at which a server dies, chosen by the number of its messages to its standby; actors import this module."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from paceline.engine.server.event_log import EventLog
from tests.engine.local import moments

MOMENTS = ("decided", "forwarded", "acknowledged")


def die_once(mark: Path) -> None:
    """End this process, unless another has ended here before."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        moments.die()


def model(build: Callable[[], nn.Module], moment: str, number: int, mark: Path) -> nn.Module:
    """Make the model; a server that makes it dies once, at this moment of its message of this number to its standby.

    ::

        decided        A is updated, and nobody knows
        forwarded      the standby may know, and no replica
        acknowledged   the standby knows, and no replica
    """
    flush, acknowledge, sent = EventLog.flush, EventLog._acknowledge, list[int]()

    def flushed(log: Any) -> None:
        if log._events and log.guarded:
            sent.append(1)
            if moment == "decided" and len(sent) == number:
                die_once(mark)
        flush(log)

    async def acknowledged(log: Any, batch: int) -> None:
        if moment == "acknowledged" and len(sent) >= number:
            die_once(mark)
        await acknowledge(log, batch)

    async def forwarded(log: Any, *args: Any) -> None:
        if moment == "forwarded" and len(sent) >= number:
            log._standby.actor.follow.remote(args[0], *(args[1] or args[2]))
            die_once(mark)
        await forward(log, *args)

    if not mark.exists():
        forward = EventLog._forward
        EventLog.flush, EventLog._acknowledge, EventLog._forward = flushed, acknowledged, forwarded  # type: ignore[method-assign]
    return build()
