"""A threshold that needs no tuning."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final, get_args

from paceline.aggregation.base import Arrival, Combine, Need
from paceline.aggregation.checks import choice, whole
from paceline.aggregation.plateau import Plateau
from paceline.aggregation.registry import register
from paceline.aggregation.thresholds import Threshold
from paceline.aggregation.throughput import Throughput


@final
@register("adaptive")
@dataclass(frozen=True)
class Adaptive(Threshold[Any]):
    """K chosen online, by what an update is made of: ``smooth-switch:adaptive``.

    ``sum``: K Δs move A K times as far, so the K that lets most of them arrive is the best:
    :class:`~paceline.aggregation.throughput.Throughput`. ``mean``: they move it once, so K stays at 1 until noise or
    staleness keep the loss from falling: :class:`~paceline.aggregation.plateau.Plateau`.

    Args:
        combine: the policy's; filled in where it is None.
        replicas: P; filled in where it is None.
    """

    combine: Combine | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.combine is not None:
            choice("adaptive:combine", self.combine, get_args(Combine))
        if self.replicas is not None:
            whole("adaptive:replicas", self.replicas, least=1)

    @cached_property
    def _rule(self) -> Threshold[Any]:
        return Throughput(largest=self.replicas) if self.combine == "sum" else Plateau(largest=self.replicas)

    @property
    def needs(self) -> frozenset[Need]:
        return self._rule.needs

    def resolved(self, *, learning_rate: float | None, combine: Combine, replicas: int) -> "Threshold[Any]":
        del learning_rate
        return replace(self, combine=self.combine or combine, replicas=self.replicas or replicas)

    def start(self) -> Any:
        return self._rule.start()

    def observe(self, memory: Any, arrival: Arrival) -> Any:
        return self._rule.observe(memory, arrival)

    def at(self, memory: Any, u: int) -> float:
        return self._rule.at(memory, u)
