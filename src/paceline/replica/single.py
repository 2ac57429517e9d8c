"""One replica on one device, plain autograd: the oracle that everything else is tested against."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.core.types import Clock
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, Measured, Replica, Sink, finite
from paceline.replica.early import Early
from paceline.replica.micro_norms import MicroNorms
from paceline.replica.state import State


class Single(Replica):
    """Δ is the gradient of the mean loss over the samples of its micro-steps, all at one A.

    With micro-steps of n_i samples and mean gradients g_i, Δ = Σ n_i·g_i / Σ n_i.

    Args:
        autograd: makes gradients.
        micro_steps: of one Δ.
        looks: whether micro-steps are looked at one by one.
    """

    def __init__(self, autograd: Autograd, micro_steps: int = 1, *, looks: bool = False) -> None:
        self._autograd, self._micro_steps = autograd, micro_steps
        self._norms = MicroNorms() if looks and micro_steps > 1 else None
        self._losses = 0.0
        self._samples = 0
        self._early: Early | None = None

    @contextmanager
    def giving(self, sink: Sink) -> Iterator[None]:
        """While it is entered, the gradients of Δ go to ``sink``, each as soon as it is final, and not to ``out``."""
        self._early = early = Early(self._autograd, sink, mean=self._micro_steps > 1)
        try:
            yield
        finally:
            self._early = None
            early.close()

    def adopt(self, state: State) -> None:
        self._autograd.bind(state)
        self._losses, self._samples = 0.0, 0
        if self._norms is not None:
            self._norms.clear()  # an attempt that was called off has left it
        if self._early is not None:
            self._early.opens()

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        weight = 1.0 if self._micro_steps == 1 else float(batch.samples)
        if self._early is not None:
            self._early.passes(self._samples + batch.samples)
        loss = self._autograd.backward(batch, clock, weight)
        if self._norms is not None:
            self._norms.add(self._autograd.take_gradients(), batch.samples)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: State) -> Measured:
        gradients = self._norms.sums if self._norms is not None and self._samples else self._autograd.take_gradients()
        with torch.no_grad():
            looked_at = self._hand_over(gradients, out)
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        micro = self._norms.seen if self._norms is not None else None
        return Measured(loss, self._samples, finite(looked_at, loss), micro)

    def _hand_over(self, gradients: list[Tensor], out: State) -> list[Tensor]:
        """Give Δ to who takes it; returns it where it may still be looked at."""
        if self._early is not None:
            self._early.rest(gradients, self._samples)
            return gradients
        if self._micro_steps > 1 and self._samples:
            torch._foreach_div_(gradients, float(self._samples))
        torch._foreach_copy_(out.views.parameters, gradients)
        return out.parameters
