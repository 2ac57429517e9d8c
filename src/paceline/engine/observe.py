"""What a policy asked to be told of each Δ; nothing is computed unasked."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.aggregation.base import NOTHING, Aggregation
from paceline.core.types import Seconds
from paceline.engine.owner import Owner
from paceline.replica.state import State


class Observer:
    """Makes ``Arrival.observed`` for one run.

    Args:
        policy: its ``needs`` say what is observed.
        owner: whose last update Δs are compared with.
    """

    def __init__(self, policy: Aggregation[Any], owner: Owner | None) -> None:
        self._needs, self._owner = policy.needs - {"loss"}, owner
        self._last: list[Tensor] | None = None
        self._busy: Seconds = 0.0
        self._asked_s: Seconds = 0.0

    @property
    def looks_inside(self) -> bool:
        """Whether Δ itself must be there to be looked at."""
        return bool(self._needs - {"server"})

    def observe(self, delta: State | None, now_s: Seconds) -> Mapping[str, float]:
        """The facts of one Δ that has just arrived."""
        if not self._needs:
            return NOTHING
        seen: dict[str, float] = {}
        if "norm" in self._needs and delta is not None:
            seen["norm"] = _norm(delta.parameters)
        if "agreement" in self._needs and delta is not None:
            seen["agreement"] = _cosine(delta.parameters, self._last) if self._last is not None else 0.0
        if "server" in self._needs:
            since = now_s - self._asked_s
            seen["server"] = min(1.0, self._busy / since) if since > 0 else 0.0
            self._busy, self._asked_s = 0.0, now_s
        return seen

    def applied(self, busy_s: Seconds) -> None:
        """An update took this long."""
        self._busy += busy_s
        if "agreement" in self._needs:
            assert self._owner is not None, "a policy without an owner has no Δ to agree"
            self._last = [v.clone() for v in self._owner.combined]


def _norm(vectors: list[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(v) for v in vectors]).norm())


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    product = sum(float(torch.dot(x, y)) for x, y in zip(a, b, strict=True))
    norms = _norm(a) * _norm(b)
    return product / norms if norms else 0.0
