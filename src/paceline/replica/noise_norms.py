"""Squared norms of gradients: as they are, as Adam preconditions them, and of each micro-step of a Δ."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.replica.base import MicroStepNorms
from paceline.replica.flat_optimizer import FlatOptimizer

WARM_STEPS = 5
"""Updates of Adam before its second moments are used, as in AdaptDL: the first ones say little."""

ROW = 1024
"""Elements whose squares are summed in their own precision before float64 sums the rest: as fast as one norm of all,
whose relative error in float32 is 3.6e-4 at 10^7 elements, where that of this is 1e-9 (torch 2.13 on a CPU)."""

Scales: TypeAlias = Sequence[Tensor]
"""Divisors of the elements, for each vector of a state."""


def square(vectors: Iterable[Tensor], scales: Scales | None = None) -> float:
    """Return the square of the Euclidean norm over all vectors, each element divided by its scale if there are scales.

    >>> square([torch.tensor([3.0, 4.0])]), square([torch.tensor([6.0, 2.0])], [torch.tensor([2.0, 0.5])])
    (25.0, 25.0)
    """
    total, norm = 0.0, torch.linalg.vector_norm
    for vector in vectors if scales is None else (v / s for v, s in zip(vectors, scales, strict=True)):
        # In float32 at least: half precision would round away the differences that the noise scale is made of.
        flat, dtype = vector.reshape(-1), torch.promote_types(vector.dtype, torch.float32)
        body = len(flat) // ROW * ROW
        rows = norm(flat[:body].view(-1, ROW), dim=1, dtype=dtype) if body else flat[:0]
        parts = [float(norm(part, dtype=d)) for part, d in ((rows, torch.float64), (flat[body:], dtype)) if len(part)]
        total += sum(length * length for length in parts)  # a product may be infinite, a power raises
    return total


class Preconditioner:
    """The scale of each element in which an optimizer measures gradients: √v̂ + ε under Adam and AdamW, else 1.

    Adam steps by m/(√v̂ + ε) rather than by g, so it is noise in g/(√v̂ + ε) that counts: the preconditioned gradient
    noise scale of Pollux (Qiao et al. 2021, arXiv 2008.12260). v̂ is the second moment before the update that is
    measured.

    Args:
        optimizer: whose second moments are used; None: this process steps nothing.
    """

    def __init__(self, optimizer: FlatOptimizer | None) -> None:
        self._optimizer = optimizer if optimizer is not None and optimizer.adaptive else None

    @property
    def plain(self) -> bool:
        """True if gradients are measured as they are."""
        return self._optimizer is None

    def ready(self, updates: int) -> bool:
        """Return True if there are scales after so many updates."""
        return self.plain or updates >= WARM_STEPS

    def scales(self) -> Scales | None:
        """Return the scales for the update that comes now; None: all are 1."""
        if self._optimizer is None:
            return None
        scales = [
            (v / (1 - group["betas"][1] ** steps)).sqrt_().add_(group["eps"]).reshape(-1)
            for v, steps, group in self._optimizer.second_moments()
        ]
        layout = self._optimizer.layout
        if len(scales) == len(layout.parameters):
            return scales
        if len(scales) != len(layout.parameter_names):  # something has no second moment
            return None
        each = iter(scales)
        return [torch.cat([next(each) for _ in block.entries]) for block in layout.parameters]


class MicroNorms:
    """Adds up the gradients of a Δ's micro-steps, and the squares of their norms."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin a new Δ."""
        self.sums: list[Tensor] = []
        """Sums of the gradients that were added."""
        self._squares, self._pieces, self._samples = 0.0, 0, 0

    def add(self, gradients: list[Tensor], samples: int) -> None:
        """Add a micro-step's gradients.

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
    def norms(self) -> MicroStepNorms:
        """The norms of a Δ that has had a micro-step."""
        return MicroStepNorms(self._squares / self._samples, self._pieces)
