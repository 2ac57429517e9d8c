"""Fewer, larger Δs: replicas take steps of their own in between."""

from dataclasses import dataclass, field, replace
from typing import Any, final

from paceline.aggregation.base import Aggregation, Arrival, Combine, Decision, Need
from paceline.aggregation.synchronous import Synchronous
from paceline.core.delta import Adopt, Change, Delta, Gradient, Mix, Replace
from paceline.core.errors import InputError, check_bool, check_int, check_number, check_positive
from paceline.core.registry import declare, register
from paceline.core.types import LeaveReason, ReplicaId, Seconds


@final
@declare("outer optimizer")
@dataclass(frozen=True)
class Outer:
    """SGD on the pseudo-gradient -Σ weight·Δ; by default DiLoCo's (arXiv 2311.08105).

    In text, ``nesterov`` or ``momentum``, after the kind of momentum: ``outer=(momentum:lr=1,momentum=0.5)``.

    Args:
        lr: learning rate.
        momentum: from 0 to below 1.
        nesterov: which momentum.

    Raises:
        InputError: a number out of its range, or Nesterov's momentum of 0.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_bool("nesterov", self.nesterov)
        name = "nesterov" if self.nesterov else "momentum"
        check_positive(f"{name}:lr", self.lr, instead=0.7)
        check_number(f"{name}:momentum", self.momentum, "from 0 to below 1", lambda m: 0 <= m < 1, instead=0.9)
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov:momentum=0 is no momentum to look ahead with; write momentum:momentum=0.")


register("nesterov", nesterov=True)(Outer)
register("momentum", nesterov=False)(Outer)


@final
@register("local-steps")
@dataclass(frozen=True)
class LocalSteps(Aggregation[Any]):
    """Δ is the parameter change after ``period`` own steps; another policy combines these Δs as it would gradients.

    With none but the defaults, local SGD: the mean over a round (arXiv 1805.09767). ``outer=nesterov`` is DiLoCo,
    ``over=asynchronous`` is Downpour (Dean et al. 2012). Optimizers and schedulers live with the replicas.

    With ``fragments=4`` a quarter of A is exchanged after each quarter of the period, each in turn, so that the most
    that is sent at once is a quarter (Streaming DiLoCo, arXiv 2501.18512)::

        own steps      |----|----|----|----|----|----|----|----|      period=16, fragments=4
        exchanged      0    1    2    3    0    1    2    3    0

    Args:
        period: own steps between two exchanges of a parameter.
        over: the policy that decides; any that takes gradients.
        outer: None: A += rate · Σ weight·Δ; or the optimizer that takes -Σ weight·Δ for a gradient.
        fragments: parts of A that are exchanged in turn; a divisor of the period.
        overlap: own steps that a replica makes while what it has sent is summed, before it takes over the new A: each
            parameter becomes the mean of its own and of A's. Below the steps from one exchange to the next.

    Raises:
        InputError: period < 1; a policy under ``over`` with a Δ of its own, or, with several fragments, by which not
            all replicas exchange the same one.
    """

    period: int = 16
    over: Aggregation[Any] = field(default_factory=Synchronous)
    outer: Outer | None = None
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        check_int("local-steps:period", self.period, least=1)
        dealt = isinstance(self.over, Aggregation) and self.over.portions is not None
        if dealt or not isinstance(self.over, Aggregation) or not isinstance(self.over.delta, Gradient):
            raise InputError(
                f"over={self.over} can't combine parameter changes, for it has a Δ of its own; "
                "write a policy that takes gradients, as over=synchronous or over=asynchronous."
            )
        if not isinstance(self.outer, Outer | None):
            raise InputError(f"outer={self.outer} is no outer optimizer; write outer=nesterov.")
        check_int("local-steps:fragments", self.fragments, least=1)
        if self.period % self.fragments:
            nearest = max(1, round(self.period / self.fragments)) * self.fragments
            raise InputError(
                f"fragments={self.fragments} are exchanged in turn within period={self.period} steps, which it does "
                f"not divide; write period={nearest}."
            )
        if self.fragments > 1 and self.collective is None:
            raise InputError(
                f"fragments={self.fragments}: under over={self.over} replicas would each exchange another part of A; "
                "write over=synchronous, or fragments=1."
            )
        each = self.period // self.fragments
        check_int("local-steps:overlap", self.overlap, least=0)
        if self.overlap >= each:
            raise InputError(
                f"overlap={self.overlap}: the next exchange begins after {each} steps, before the last one was taken "
                f"over; write overlap={each - 1}{' or less' if each > 1 else ''}."
            )

    @property
    def delta(self) -> Delta:
        return Change(self.period // self.fragments, self.fragments, self.overlap)

    @property
    def adopt(self) -> Adopt:
        return Mix(0.5) if self.overlap else Replace()

    @property
    def needs(self) -> frozenset[Need]:
        return self.over.needs

    @property
    def collective(self) -> Combine | None:
        return self.over.collective

    def slots(self, replicas: int) -> int:
        return self.over.slots(replicas)

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "LocalSteps":
        return replace(self, over=self.over.resolved(learning_rate=learning_rate, replicas=replicas))

    def start(self, replicas: int) -> Any:
        return self.over.start(replicas)

    def arrived(self, state: Any, arrival: Arrival) -> tuple[Any, Decision]:
        return self.over.arrived(state, arrival)

    def left(self, state: Any, replica: ReplicaId, reason: LeaveReason) -> tuple[Any, Decision]:
        return self.over.left(state, replica, reason)

    def joined(self, state: Any, replica: ReplicaId) -> tuple[Any, Decision]:
        return self.over.joined(state, replica)

    def waits_for(self, state: Any) -> int:
        return self.over.waits_for(state)

    def deadline(self, state: Any) -> Seconds | None:
        return self.over.deadline(state)

    def tick(self, state: Any, time_s: Seconds) -> tuple[Any, Decision]:
        return self.over.tick(state, time_s)
