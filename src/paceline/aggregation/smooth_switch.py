"""From asynchronous to synchronous, smoothly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

from paceline.aggregation.base import Aggregation, Arrival, Buffer, Combine, Decision, Need, updates
from paceline.aggregation.thresholds import Function, PerLearningRate, Step, Threshold
from paceline.core.errors import InputError, check_bool, check_choice, check_positive
from paceline.core.registry import register
from paceline.core.types import LeaveReason, ReplicaId

# Unit of u: Δs received, or updates made.
Count: TypeAlias = Literal["received", "applied"]

_EVERY = 500


class Switch(NamedTuple):
    """The state of :class:`SmoothSwitch`."""

    buffer: Buffer
    received: int
    """Δs received, the last one included."""
    applied: int
    """Updates of A made."""
    memory: Any
    """Memory of the threshold."""


@final
@register("smooth-switch")
@dataclass(frozen=True)
class SmoothSwitch(Aggregation[Switch]):
    """Hold Δs until there are K(u), apply them together and release their replicas (arXiv 2407.00101).

    K(u) = min(P, 1 + ⌊u/every⌋). u is the number of Δs received when the decision is made, the newest one included:
    with every=500 the 500th Δ is the first for which K is 2. With P = 3 and every=4 (a digit names the replica whose Δ
    arrives, | an update)::

        u        1  2  3  4  5  6  7  8  9 10 11 12 ...
        K        1  1  1  2  2  2  2  3  3  3  3  3       P is reached: synchronous from here on
        arrives  0| 1| 2| 0  1| 2  0| 1  0  2|            the 8th waits for two others

    Args:
        every: Δs between two steps of K; a number, or a multiple of 1 / learning rate (text form ``every=5/lr``).
        threshold: instead of ``every``: a :class:`~paceline.aggregation.thresholds.Threshold`, or a function u -> K.
        combine: ``mean`` weighs by samples / Σ samples, so that K = P is synchronous training; ``sum`` weighs 1, so
            that K Δs move A as K asynchronous updates would.
        hold: whether a replica waits for the update that its Δ is in, or goes on at once.
        count: unit of u: ``received`` Δs, or ``applied``, the updates made so far.

    Raises:
        InputError: an option that is out of its range, or both ``every`` and ``threshold``.

    >>> SmoothSwitch(threshold=Step(100)) == SmoothSwitch(every=100)
    True
    """

    every: float | PerLearningRate = _EVERY
    threshold: Threshold[Any] | Callable[[int], float] | None = None
    combine: Combine = "mean"
    hold: bool = True
    count: Count = "received"

    def __post_init__(self) -> None:
        if self.threshold is not None and self.every != _EVERY:
            raise InputError(
                f"every={self.every} and threshold={self.threshold} both say what K is; write one of them."
            )
        if isinstance(self.threshold, Step) and self.threshold.plain:  # one value, one way to write it
            object.__setattr__(self, "every", self.threshold.every)
            object.__setattr__(self, "threshold", None)
        elif self.threshold is not None and not isinstance(self.threshold, Threshold):
            object.__setattr__(self, "threshold", Function(self.threshold))
        if not isinstance(self.every, PerLearningRate):
            check_positive("smooth-switch:every", self.every, instead=_EVERY)
        check_choice("smooth-switch:combine", self.combine, get_args(Combine))
        check_bool("smooth-switch:hold", self.hold)
        check_choice("smooth-switch:count", self.count, get_args(Count))

    @cached_property
    def _rule(self) -> Threshold[Any]:
        return self.threshold if isinstance(self.threshold, Threshold) else Step(self.every)

    @property
    def needs(self) -> frozenset[Need]:
        return self._rule.needs

    def slots(self, replicas: int) -> int:
        return 1 if self.hold else replicas

    def resolved(self, *, learning_rate: float | None, replicas: int) -> "SmoothSwitch":
        rule = self._rule.resolved(learning_rate=learning_rate, combine=self.combine, replicas=replicas)
        return replace(self, every=_EVERY, threshold=rule)

    def start(self, replicas: int) -> Switch:
        return Switch(Buffer(frozenset(range(replicas))), 0, 0, self._rule.start())

    def arrived(self, state: Switch, arrival: Arrival) -> tuple[Switch, Decision]:
        memory = self._rule.observe(state.memory, arrival)
        return self._settle(Switch(state.buffer.add(arrival), state.received + 1, state.applied, memory))

    def left(self, state: Switch, replica: ReplicaId, reason: LeaveReason) -> tuple[Switch, Decision]:
        del reason
        return self._settle(state._replace(buffer=state.buffer.without(replica)))

    def joined(self, state: Switch, replica: ReplicaId) -> tuple[Switch, Decision]:
        return state._replace(buffer=state.buffer.joined(replica)), ()

    def waits_for(self, state: Switch) -> int:
        u = state.received if self.count == "received" else state.applied
        return int(max(1, min(self._rule.at(state.memory, u), len(state.buffer.alive))))

    def _settle(self, state: Switch) -> tuple[Switch, Decision]:
        buffer, decision = state.buffer.settle(self.waits_for(state), self.combine, hold=self.hold)
        return Switch(buffer, state.received, state.applied + updates(decision), state.memory), decision
