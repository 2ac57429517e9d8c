"""Local SGD in a replica of several workers: each steps its part of the parameters with an optimizer of its own."""

import math
from collections.abc import Callable, Collection
from typing import final

import torch

from paceline.core.delta import Adopt
from paceline.core.types import Clock
from paceline.program import Program
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.clipping import clip_by_square, square_norm
from paceline.replica.flat_optimizer import FlatOptimizer, optimizer_of_part
from paceline.replica.flat_state import FlatLayout, FlatState, finite
from paceline.replica.local_sgd import mix


@final
class ShardedLocalSGD(Replica):
    """One worker's part of the replica; the counterpart of :class:`~paceline.replica.local_sgd.LocalSGD`.

    Args:
        program: gives optimizer, scheduler and clipping.
        inner: computes this worker's part of the gradient of one batch.
        whole: the layout of A.
        layout: of this worker's part.
        counted: the names of the parameters that count here in the norm of the gradient.
        summed: a number -> its sum over the workers of the replica, which all ask for it together.
        rule: what the parameters become when an A is sent.
        distance: whether the parameters are sent, not how far they have moved.
    """

    def __init__(
        self,
        program: Program,
        inner: Replica,
        whole: FlatLayout,
        layout: FlatLayout,
        counted: Collection[str],
        summed: Callable[[float], float],
        rule: Adopt,
        *,
        distance: bool,
    ) -> None:
        self._program, self._inner, self._whole = program, inner, whole
        self._summed, self._rule, self._distance = summed, rule, distance
        self._gradient = layout.new()
        views = zip(layout.parameter_names, self._gradient.views.parameters, strict=True)
        self._counted = [view for name, view in views if name in counted]
        self._own: FlatState | None = None
        self._losses, self._samples = 0.0, 0

    def forget(self) -> None:
        """Start from the A that is sent next."""
        self._own = None

    def adopt(self, state: FlatState) -> None:
        if self._own is None:
            self._own, self._read = state.clone(), state.clone()
            self._stepper = self._new_stepper(self._own)
        else:
            mix(self._own, state, self._rule)
            self._read.copy_(self._own)
        self._losses, self._samples = 0.0, 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        assert self._own is not None, "advance before adopt"
        if not batch.samples:
            return math.nan
        self._inner.adopt(self._own)
        loss = self._inner.advance(batch, clock)
        self._inner.finish(self._gradient)
        for mine, moved in zip(self._own.buffers, self._gradient.buffers, strict=True):
            mine.copy_(moved)
        self._clip()
        if self._stepper is not None:
            self._stepper.step(self._gradient.parameters)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        assert self._own is not None, "finish before adopt"
        out.copy_(self._own)
        if not self._distance and out.parameters:
            torch._foreach_sub_(out.parameters, self._read.parameters)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(out.parameters, 0.0))

    def _new_stepper(self, own: FlatState) -> FlatOptimizer | None:
        if not own.parameters:
            return None
        make = optimizer_of_part(self._program.optimizer, self._whole, own.layout)
        return FlatOptimizer(make, self._program.scheduler, own, self._gradient)

    def _clip(self) -> None:
        bound = self._program.clip_norm
        if bound is None:
            return
        clip_by_square(self._gradient.parameters, self._summed(square_norm(self._counted)), bound)
