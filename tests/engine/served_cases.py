"""Runs of ranks with servers of A, and a policy that makes them as predictable as one process."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from paceline import Program, Strategy
from paceline.aggregation.synchronous import Synchronous
from tests.engine import programs
from tests.engine.distributed_cases import MOMENTUM

STEPS = 9
"""Two epochs, nearly, of 50 samples for two replicas of 4 samples each: an uneven last batch."""

ROUNDING = 1e-12
"""Both sides add the same products in another order: some hundred rounding errors of 2e-16 each, over 9 steps."""

NORMALISED = 1e-9
"""Optimizers that divide a gradient by its own size make its relative error theirs, also where it is nearly zero."""


@dataclass(frozen=True)
class AtServers(Synchronous):
    """Synchronous, but no collective: servers make the updates."""

    @property
    def collective(self) -> None:
        return None


def at_servers(text: str) -> Strategy:
    """A strategy, whose text lacks the policy, with that one, which has no name: the registry is for all tests."""
    return replace(Strategy.parse(text), aggregation=AtServers())


def program(**fields: Any) -> Program:
    return programs.program(**{"optimizer": MOMENTUM} | fields)


CLIPPED = {
    "optimizer": functools.partial(AdamW, lr=0.01),
    "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5),
    "clip_norm": 0.05,
}

LOCKSTEP: dict[str, tuple[Program, str, float]] = {
    "momentum": (program(), "", ROUNDING),
    "momentum, 2 servers": (program(), "servers=2", ROUNDING),
    "clipped and scheduled, 2 servers": (program(**CLIPPED), "servers=2", NORMALISED),
    "tied": (program(model=programs.Tied), "servers=2", ROUNDING),
    "dict": (program(model=programs.Two, train=programs.with_dict()), "", ROUNDING),
}
"""Of replicas of one worker."""

TEAMS = ("stages=2", "shards=2 servers=2", "stages=2 micro_batches=2 servers=4")
"""Of replicas of two."""

AHEAD = {1: ("",), 2: ("stages=2 micro_batches=2 servers=2", "shards=2")}
"""Forms of one replica that pulls ahead, by its workers."""

SPANNING = ("stages=2 micro_batches=2 servers=2", "shards=2")
"""Of one replica, whose workers are on two hosts."""

POLICIES = (
    "asynchronous",
    "smooth-switch:every=3",
    "stale-synchronous:bound=1",
    "buffered:k=2",
    "decoupled:period=2",
    "elastic-averaging:period=2,elasticity=0.1",
    "local-steps:period=2,over=asynchronous",
)
