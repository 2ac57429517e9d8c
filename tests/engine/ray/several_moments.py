"""Moments at which one of several servers, or of their standbys, dies; actors import this module."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.engine.server.first_server_link import FirstServerLink
from paceline.engine.server.messages import Member
from paceline.engine.server.other_servers import OtherServers
from paceline.engine.server.server_mesh import ServerMesh
from paceline.engine.server.slice_run import SliceRun
from tests.engine.ray.server_moments import die_once

FIRSTS = {
    "decides": (OtherServers, "send", 0),  # nobody has the event
    "standby has it": (OtherServers, "_wait_for_standby", 1),  # and nobody else
    "some have it": (OtherServers, "_ending", 0),  # the standby and server 1, and not the standby of that
    "all have it": (OtherServers, "send", 1),
}

ALL = {
    "adds up": (ServerMesh, "summed", 0),  # nobody has its numbers
    "waits for numbers": (ServerMesh, "_read", 0),  # all have them
}

OTHERS = {
    "is sent a slice": (SliceRun, "stage", 0),  # its standby is sent nothing
    "has a slice": (FirstServerLink, "staged", 1),  # and has told so
    "is sent an event": (SliceRun, "_take", 0),
    "has taken an event": (SliceRun, "_take", 1),
    "saves": (FirstServerLink, "send_packed", 0),
}

MOMENTS: dict[str, tuple[type, str, int]] = FIRSTS | ALL | OTHERS


@dataclass
class Dying:
    """Makes the model; in each process that unpickles it one server dies, once, at a moment.

    Args:
        build: makes the model.
        member: the server.
        moment: a name of the moments above.
        number: how often the moment has to come.
        mark: is made by who dies.
    """

    build: Callable[[], nn.Module]
    member: Member
    moment: str
    number: int
    mark: Path

    def __call__(self) -> nn.Module:
        return self.build()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _State.plan, _State.calls = self, 0
        if not _State.watched:
            _State.watched = True
            _watch()


class _State:
    """What this process knows."""

    plan: Dying | None = None
    own: Member | None = None
    calls = 0
    watched = False


def _watch() -> None:
    """Have all of these methods look whether their moment has come."""
    initialize = ServerMesh.__init__

    def initialized(mesh: ServerMesh, servers: int, own: Member, *args: Any) -> None:
        _State.own = own
        initialize(mesh, servers, own, *args)

    ServerMesh.__init__ = initialized  # type: ignore[method-assign]
    for name in {(kind, method) for kind, method, _ in MOMENTS.values()}:
        _watch_method(*name)


def _watch_method(kind: type, name: str) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        _reached(kind, name, 0, args)
        result = method(*args, **kwargs)
        _reached(kind, name, 1, args)
        return result

    setattr(kind, name, watched)


def _reached(kind: type, name: str, position: int, args: Any) -> None:
    plan = _State.plan
    if plan is None or _State.own != plan.member or MOMENTS[plan.moment] != (kind, name, position):
        return
    if plan.moment == "some have it" and args[1] != Member(1, standby=True):
        return
    _State.calls += 1
    if _State.calls == plan.number:
        die_once(plan.mark)
