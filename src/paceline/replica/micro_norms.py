"""Gradients of micro-steps, looked at one by one as they are added up."""

import torch
from torch import Tensor

from paceline.replica.base import Micro
from paceline.replica.norms import square


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
