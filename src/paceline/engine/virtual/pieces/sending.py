"""What collectives and messages take between processes of this host, through shared memory."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.core.mesh import Mesh, Place
from paceline.core.types import Seconds
from paceline.engine.team.routes import Routes
from paceline.engine.team.shards import GroupShards
from paceline.engine.team.team import Team
from paceline.engine.team.wire import GroupWire
from paceline.engine.virtual.pieces.silent import Call

REPEATS = 9
IN_A_ROW = 5
"""Calls that are timed as one: those who have just met are not yet in step."""


class Message(NamedTuple):
    """What a value takes on its way from one stage to the next."""

    send: Seconds = 0.0
    """For which its maker is busy."""
    take: Seconds = 0.0
    """For which its consumer is busy."""
    way: Seconds = 0.0
    """Between the two."""


def collectives(team: Team, calls: Iterable[Call]) -> Mapping[Call, Seconds]:
    """Of each kind and size; all ranks measure the same ones together."""
    assert team.traffic is not None, "there are two at least"
    shards = GroupShards(team.traffic, team.world.rank)
    return {call: _in_a_row(team, lambda call=call: call.make(shards)) for call in dict.fromkeys(calls)}  # type: ignore[misc]


def message(team: Team, nbytes: int) -> Message:
    """Of so many bytes, from the first rank to the second and back; the others look on."""
    assert team.traffic is not None, "there are two at least"
    if team.world.rank > 1:
        return _medians([_nothing(team) for _ in range(REPEATS)])
    rank = team.world.rank
    wire = GroupWire(team.traffic, Routes(Mesh(1, (1,) * team.world.size), Place(0, rank)))
    return _medians([_there_and_back(team, wire, nbytes) for _ in range(REPEATS)])


def meet(team: Team) -> None:
    """Wait for all others."""
    team.gather(None, "the others, to begin together")


def _nothing(team: Team) -> Message:
    for _ in range(3):
        meet(team)
    return Message()


def _there_and_back(team: Team, wire: GroupWire, nbytes: int) -> Message:
    rank, value = team.world.rank, torch.ones(max(1, nbytes // 4))
    meet(team)
    began = time.perf_counter()
    if rank == 0:
        wire.send(value, 1, "a value")
        send = time.perf_counter() - began
        wire.expect(value.shape, value.dtype, 1, "a value").take()
        both = time.perf_counter() - began
    else:
        arrived = wire.expect(value.shape, value.dtype, 0, "a value").take()
        wire.send(arrived, 0, "a value")
        send = both = 0.0
    wire.settle()
    meet(team)
    if rank == 1:
        wire.send(value, 0, "a value")
    meet(team)  # it lies there
    began = time.perf_counter()
    if rank == 0:
        wire.expect(value.shape, value.dtype, 1, "a value").take()
    take = time.perf_counter() - began
    wire.settle()
    return Message(send, take, max(0.0, both / 2 - send - take))


def _medians(found: Sequence[Message]) -> Message:
    return Message(*(statistics.median(each) for each in zip(*found, strict=True)))


def _in_a_row(team: Team, work: Callable[[], None]) -> Seconds:
    found = []
    for _ in range(REPEATS):
        meet(team)
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            work()
        found.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(found)
