"""Squared norms of gradients, as they are and as Adam sees them.

Gradients of micro-steps, looked at one by one as they are added up.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.replica.base import Micro
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout

WARM_STEPS = 5
"""So many updates Adam makes before its second moments are divided by, as in AdaptDL: the first ones say little."""

ROW = 1024
"""Elements whose squares are added in their own precision, before float64 adds the rest: as quick as one norm of all,
which in float32 is wrong by 3.6e-4 at 10^7 elements where this is by 1e-9 (torch 2.13 on a CPU)."""

Scales: TypeAlias = Sequence[Tensor]
"""What to divide by, for each vector of a state."""


def square(vectors: Iterable[Tensor], scales: Scales | None = None) -> float:
    """The square of the Euclidean norm over all vectors, each element divided by its scale where there are scales.

    >>> square([torch.tensor([3.0, 4.0])]), square([torch.tensor([6.0, 2.0])], [torch.tensor([2.0, 0.5])])
    (25.0, 25.0)
    """
    seen = vectors if scales is None else (v / s for v, s in zip(vectors, scales, strict=True))
    return sum(map(_square, seen))


def _square(vector: Tensor) -> float:
    """In float32 at least: half precision would round away what is to be told apart."""
    flat, dtype = vector.reshape(-1), torch.promote_types(vector.dtype, torch.float32)
    body, norm = len(flat) // ROW * ROW, torch.linalg.vector_norm
    lengths = norm(flat[:body].view(-1, ROW), dim=1, dtype=dtype) if body else flat[:0]
    parts = [
        float(norm(part, dtype=high)) for part, high in ((lengths, torch.float64), (flat[body:], dtype)) if len(part)
    ]
    return sum(length * length for length in parts)  # a product may be infinite, a power raises


class Preconditioner:
    """How an optimizer measures length: Adam and AdamW by √v̂ + ε, all others by what they are given.

    Adam steps by m/(√v̂ + ε) rather than by g, so it is noise in g/(√v̂ + ε) that counts: the preconditioned gradient
    noise scale of Pollux (Qiao et al. 2021, arXiv 2008.12260). v̂ is the second moment before the update that is looked
    at.

    Args:
        stepper: of the optimizer; None: there is nothing to step on here.
    """

    def __init__(self, stepper: FlatOptimizer | None) -> None:
        self._stepper = stepper if stepper is not None and stepper.adaptive else None

    @property
    def plain(self) -> bool:
        """Whether gradients are measured as they are."""
        return self._stepper is None

    def ready(self, updates: int) -> bool:
        """Whether there is something to measure by, after so many updates."""
        return self.plain or updates >= WARM_STEPS

    def scales(self) -> Scales | None:
        """What to divide by in the update that comes now; None: by nothing."""
        if self._stepper is None:
            return None
        found = [
            (v / (1 - group["betas"][1] ** steps)).sqrt_().add_(group["eps"]).reshape(-1)
            for v, steps, group in self._stepper.second_moments()
        ]
        return _by_vector(found, self._stepper.layout)


def _by_vector(found: list[Tensor], layout: FlatLayout) -> list[Tensor] | None:
    """As the layout's vectors; None where something has no second moment."""
    if len(found) == len(layout.parameters):
        return found
    if len(found) != len(layout.parameter_names):
        return None
    each = iter(found)
    return [torch.cat([next(each) for _ in block.entries]) for block in layout.parameters]


class MicroNorms:
    """Those of one Δ after the other."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A new Δ begins."""
        self.sums: list[Tensor] = []
        """Of the gradients that were added."""
        self._squares, self._pieces, self._samples = 0.0, 0, 0

    def add(self, gradients: list[Tensor], samples: int) -> None:
        """A micro-step has been made.

        Args:
            gradients: ``samples`` times those of its mean loss; kept, and added to.
            samples: of it.
        """
        self._squares += square(gradients) / samples
        self._pieces += 1
        self._samples += samples
        if self.sums:
            torch._foreach_add_(self.sums, gradients)
        else:
            self.sums = gradients

    @property
    def seen(self) -> Micro:
        """What there is of a Δ, once a micro-step has been made."""
        return Micro(self._squares / self._samples, self._pieces)
