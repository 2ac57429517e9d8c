"""Looks at gradients where they are applied: each as it passes by, and what is made of them."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.noise_scale import Part, differenced, observation
from paceline.core.types import Version
from paceline.engine.noise_ledger import NoiseLedger
from paceline.replica.base import Micro
from paceline.replica.norms import Preconditioner, Scales, square
from paceline.replica.state import State
from paceline.replica.stepper import Stepper


class Seen(NamedTuple):
    """One Δ of an update, and what is known of it."""

    delta: State
    weight: float
    samples: int
    version: Version
    """Of the A it was made at."""
    micro: Micro | None = None


class NoiseMeter:
    """Of one run whose server sees all Δs.

    An update of several Δs is looked at by itself. Of one alone its micro-steps tell, and where there are none, two
    such updates in a row are taken together (:func:`~paceline.core.noise_scale.differenced`).

    Args:
        ledger: is told what was seen.
    """

    def __init__(self, ledger: NoiseLedger) -> None:
        self._ledger = ledger
        self._measure = Preconditioner(None)
        self._scales: Scales | None = None
        self._updates = 0
        self._parts: list[tuple[Part, Version]] = []
        self._square: float | None = None
        self._before: tuple[list[Tensor], Part, Version] | None = None

    def measure_by(self, stepper: Stepper) -> None:
        """The optimizer that steps on what is seen."""
        self._measure = Preconditioner(stepper)

    def through(self, seen: Iterable[Seen], count: int) -> Iterator[tuple[State, float]]:
        """The Δs of one update and their weights, each looked at before it is handed on.

        Args:
            seen: may compute each as it is asked for.
            count: how many there are.
        """
        self._parts, self._square = [], None
        looks = self._measure.ready(self._updates)
        self._scales = self._measure.scales() if looks else None
        for each in seen:
            if looks:
                self._look(each, alone=count == 1)
            yield each.delta, each.weight

    def combined(self, total: list[Tensor]) -> None:
        """What the Δs of the update were combined to."""
        if len(self._parts) > 1:
            self._square = square(total, self._scales)

    def updated(self) -> None:
        """The update has been made."""
        self._updates += 1
        if self._square is not None:
            biased = len({version for _, version in self._parts}) > 1
            self._ledger.take(observation([part for part, _ in self._parts], self._square, biased=biased))
            self._before = None

    def _look(self, seen: Seen, *, alone: bool) -> None:
        whole = square(seen.delta.parameters, self._scales)
        pieces = seen.micro if self._measure.plain else None
        part = Part(seen.samples, seen.weight, *(pieces or (whole, 1)))
        self._parts.append((part, seen.version))
        if alone and part.pieces > 1:
            self._ledger.take(observation([part], whole * seen.weight**2))
        elif alone and part.samples:
            self._pair(seen, part)

    def _pair(self, seen: Seen, part: Part) -> None:
        """Every other one is kept until the next has come."""
        if self._before is None:
            self._before = [v.clone() for v in seen.delta.parameters], part, seen.version
            return
        (vectors, first, version), self._before = self._before, None
        first = first._replace(square=square(vectors, self._scales))
        share = first.samples / (first.samples + part.samples)
        mean = [torch.lerp(new, old, share) for new, old in zip(seen.delta.parameters, vectors, strict=True)]
        biased = version != seen.version
        self._ledger.take(differenced(first, part, square(mean, self._scales), biased=biased))
