"""A threshold that needs no tuning."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, final, get_args

from paceline.aggregation.base import Arrival, Combine, Need
from paceline.aggregation.plateau import Plateau
from paceline.aggregation.thresholds import Threshold
from paceline.aggregation.throughput import Throughput
from paceline.core.errors import check_choice, check_int
from paceline.core.registry import register

# Memory of each rule.
Memories: TypeAlias = tuple[Any, ...]


@final
@register("adaptive")
@dataclass(frozen=True)
class Adaptive(Threshold[Memories]):
    """K chosen online: ``smooth-switch:adaptive``, the largest K of two rules.

    :class:`~paceline.aggregation.plateau.Plateau`: K stays at 1 until noise or staleness keep the loss from falling.
    Under ``sum`` K Δs move A K times as far, so there
    :class:`~paceline.aggregation.throughput.Throughput` counts as well: the K at which most of them arrive.

    Args:
        combine: the policy's; filled in if it is None.
        replicas: P; filled in if it is None.
    """

    combine: Combine | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.combine is not None:
            check_choice("adaptive:combine", self.combine, get_args(Combine))
        if self.replicas is not None:
            check_int("adaptive:replicas", self.replicas, least=1)

    @cached_property
    def _rules(self) -> tuple[Threshold[Any], ...]:
        plateau = Plateau(largest=self.replicas)
        return (plateau, Throughput(largest=self.replicas)) if self.combine == "sum" else (plateau,)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset[Need]().union(*(rule.needs for rule in self._rules))

    def resolved(self, *, learning_rate: float | None, combine: Combine, replicas: int) -> "Threshold[Any]":
        del learning_rate
        return replace(self, combine=self.combine or combine, replicas=self.replicas or replicas)

    def start(self) -> Memories:
        return tuple(rule.start() for rule in self._rules)

    def observe(self, memory: Memories, arrival: Arrival) -> Memories:
        return tuple(rule.observe(own, arrival) for rule, own in zip(self._rules, memory, strict=True))

    def at(self, memory: Memories, u: int) -> float:
        return max(rule.at(own, u) for rule, own in zip(self._rules, memory, strict=True))
