"""Replicas with an optimizer of their own, which make some steps before they push: local SGD, elastic SGD, Hogwild."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, final

import torch

from paceline.checkpoint.base import TensorChunk, parameter_of
from paceline.checkpoint.reader import TensorSource
from paceline.core.types import Clock
from paceline.program import Program
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout, FlatState, finite
from paceline.replica.gradient_clipping import clip, clip_by_square, square_norm
from paceline.replica.optimizer_factory import optimizer_of_part
from paceline.replica.optimizer_state import Describe, whole_chunks
from paceline.replica.own_parameters import Exchange, OwnParameters
from paceline.replica.single import Single


class KeepsState(Protocol):
    """A replica that keeps an optimizer from Δ to Δ, and perhaps parameters of its own."""

    def chunks(self) -> list[TensorChunk]:
        """Return its tensors, between two Δs."""

    def state_json(self) -> dict[str, Any] | None:
        """Return what is no tensor; None: it has nothing of its own yet."""

    def restore(self, saved: Mapping[str, Any], source: TensorSource, layout: FlatLayout) -> None:
        """Go on with what it had, where ``saved`` is what is no tensor, and ``layout`` that of A."""


class _SteppingReplica(Replica):
    """A replica with an optimizer of its own, which makes a step on each batch.

    Args:
        program: gives loss, optimizer and scheduler.
        autograd: computes gradients.
        refuses: whether it makes no step by a gradient, or at a loss, that is not finite.
    """

    def __init__(self, program: Program, autograd: Autograd, *, refuses: bool = False) -> None:
        self._program, self._autograd, self._refuses = program, autograd, refuses
        self._refused = False
        """Whether it made no step since A was adopted for that reason."""
        self._gradient = autograd.layout.new(device=autograd.device)
        self._flat_optimizer: FlatOptimizer | None = None
        self._losses, self._samples = 0.0, 0

    @property
    def autograd(self) -> Autograd:
        """Computes the gradients."""
        return self._autograd

    def _begin(self, state: FlatState) -> None:
        """Step ``state``, to which the parameters are bound, with a new optimizer."""
        program = self._program
        self._flat_optimizer = FlatOptimizer(program.optimizer, program.scheduler, state, self._gradient)

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        autograd, bound = self._autograd, self._program.clip_norm
        loss = autograd.backward(batch, clock)
        assert self._flat_optimizer is not None, "advance before adopt"
        gradient = self._gradient
        torch._foreach_copy_(gradient.views.parameters, autograd.take_gradients())
        if autograd.own is not None:
            self._flat_optimizer.take_options(autograd.own.options)
        self._refused = self._refuses and not finite(gradient.parameters, autograd.checked_loss(loss))
        if bound is not None:
            clip(gradient.parameters, bound)
        if not self._refused:
            self._flat_optimizer.step(gradient.parameters)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def _measured(self, out: FlatState) -> Measured:
        """Return the measurements of the steps since A was adopted, whose result is ``out``."""
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(out.parameters, self._autograd.checked_loss(loss)))


@final
class LocalSGD(_SteppingReplica):
    """Steps its own parameters x, and sends how far they moved (LocalSteps) or x itself (elastic averaging).

    After a Δ that is not finite its own parameters are of no use: it begins anew with the next A.

    Args:
        program: gives loss, optimizer and scheduler.
        autograd: computes gradients.
        exchange: how x and A meet.
        distance: False: Δ = x - x_read (:class:`~paceline.aggregation.base.Change`); True: x itself, from which the
            server subtracts its A of that moment (:class:`~paceline.aggregation.base.Distance`).
    """

    def __init__(self, program: Program, autograd: Autograd, exchange: Exchange, *, distance: bool) -> None:
        super().__init__(program, autograd)
        self.exchange, self._distance = exchange, distance
        self._own: OwnParameters | None = None

    def adopt(self, state: FlatState) -> None:
        state = state.to(self._autograd.device)
        if self._own is None:
            self._own = OwnParameters(state, self.exchange)
            self._begin(self._own.state)
        else:
            self._own.send(state)
        self._autograd.bind(self._own.state)
        self._losses, self._samples = 0.0, 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        assert self._own is not None, "advance before adopt"
        if self._own.due():
            self._take_over(self._own)
        return super().advance(batch, clock)

    def _take_over(self, own: OwnParameters) -> None:
        """Take over an A that was sent some steps ago."""
        self._write_back(own)
        own.take_over()
        self._autograd.bind(own.state)

    def _write_back(self, own: OwnParameters) -> None:
        """Have the buffers of x as the forward passes have left them."""
        if own.state.buffers:
            with torch.no_grad():
                self._autograd.write_buffers(own.state)

    def chunks(self) -> list[TensorChunk]:
        """Return its own parameters, buffers and optimizer state, between two Δs; none before the first A."""
        if self._own is None or self._flat_optimizer is None:
            return []
        return [*whole_chunks(self._own.kept()), *self._flat_optimizer.chunks()]

    def state_json(self) -> dict[str, Any] | None:
        """Return what of its own state is no tensor; None: it has nothing of its own, and begins with an A."""
        if self._own is None or self._flat_optimizer is None:
            return None
        return self._flat_optimizer.state_json() | {"version": self._own.version}

    def restore(self, saved: Mapping[str, Any], source: TensorSource, layout: FlatLayout) -> None:
        """Go on from a checkpoint; ``saved`` is what :meth:`state_json` returned, and ``layout`` that of A."""
        own = layout.new(device=self._autograd.device)
        source.read_into(whole_chunks(own))
        self._own = OwnParameters.restored(own, saved, self.exchange)
        self._begin(self._own.state)
        if self._flat_optimizer is not None:
            self._flat_optimizer.restore(saved, source)

    def finish(self, out: FlatState) -> Measured:
        own = self._own
        assert own is not None, "finish before adopt"
        if own.behind:  # fewer steps than the overlap
            self._take_over(own)
        there = out if out.device == self._autograd.device else self._gradient
        with torch.no_grad():
            torch._foreach_copy_(there.views.parameters, [p.detach() for p in self._autograd.parameters])
            if not self._distance:
                own.subtract_read(there)
            self._autograd.write_buffers(there)
            if there is not out:
                out.copy_(there)
        self._write_back(own)
        measured = self._measured(there)
        if not measured.finite:  # its own optimizer has that step in its state, too
            self._own = None
        return measured


@final
class ShardedLocalSGD(Replica):
    """One worker's part of the replica; the counterpart of :class:`LocalSGD`.

    Args:
        program: gives optimizer, scheduler and clipping.
        inner: computes this worker's part of the gradient of one batch.
        whole: the layout of A.
        gradient: memory of this worker's part of a gradient, on its device.
        owned: names of the tensors of A that this worker has for its replica: in checkpoints, and in the norm of the
            gradient.
        describe: a tensor of the shape of a parameter's part -> chunks of the full one.
        summed: a number -> its sum over the workers of the replica, which all ask for it together.
        exchange: how the parameters and A meet.
        distance: whether the parameters are sent, not how far they have moved.
    """

    def __init__(
        self,
        program: Program,
        inner: Replica,
        whole: FlatLayout,
        gradient: FlatState,
        owned: Collection[str],
        describe: Describe,
        summed: Callable[[float], float],
        exchange: Exchange,
        *,
        distance: bool,
    ) -> None:
        self._program, self._inner, self._whole = program, inner, whole
        self._summed, self.exchange, self._distance = summed, exchange, distance
        self._owned, self._describe = owned, describe
        self._gradient = gradient
        views = zip(gradient.layout.parameter_names, gradient.views.parameters, strict=True)
        self._counted = [view for name, view in views if name in owned]
        self._own: OwnParameters | None = None
        self._optimizer: FlatOptimizer | None = None
        self._losses, self._samples = 0.0, 0

    def forget(self) -> None:
        """Start from the A that is sent next."""
        self._own = None

    def _begin(self, own: OwnParameters) -> None:
        """Step these parameters, with a new optimizer."""
        self._own, self._optimizer, program, state = own, None, self._program, own.state
        if state.parameters:
            make = optimizer_of_part(program.optimizer, self._whole, state.layout)
            self._optimizer = FlatOptimizer(make, program.scheduler, state, self._gradient)

    def chunks(self) -> list[TensorChunk]:
        """Return what this worker has for its replica, between two Δs; nothing before the first A."""
        if self._own is None:
            return []
        found = self._described(self._own.kept())
        if self._optimizer is not None:
            found += self._optimizer.chunks(self._describe)
        return [chunk for chunk in found if parameter_of(chunk.name) in self._owned]

    def state_json(self) -> dict[str, Any] | None:
        """Return what of its own state is no tensor; None: it has nothing of its own, and begins with an A."""
        if self._own is None:
            return None
        saved = {} if self._optimizer is None else self._optimizer.state_json(self._describe)
        return saved | ({"version": self._own.version} if saved else {})

    def restore(self, saved: Mapping[str, Any], source: TensorSource, layout: FlatLayout) -> None:
        """Go on from a checkpoint; ``saved`` is what all workers of the replica returned, merged."""
        del layout  # this worker has a part of it
        own = self._gradient.empty_like()
        source.read_into(self._described(own))
        self._begin(OwnParameters.restored(own, saved, self.exchange))
        if self._optimizer is not None:
            self._optimizer.restore(saved, source, self._describe)

    def _described(self, state: FlatState) -> list[TensorChunk]:
        return [chunk for entry, view in state.entries() for chunk in self._describe("", entry, view)]

    def adopt(self, state: FlatState) -> None:
        if self._own is None:
            self._begin(OwnParameters(state, self.exchange))
        else:
            self._own.send(state)
        self._losses, self._samples = 0.0, 0

    def advance(self, batch: Batch, clock: Clock) -> float:
        assert self._own is not None, "advance before adopt"
        if self._own.due():
            self._own.take_over()
        if not batch.samples:
            return math.nan
        self._inner.adopt(self._own.state)
        loss = self._inner.advance(batch, clock)
        self._inner.finish(self._gradient)
        for own, moved in zip(self._own.state.buffers, self._gradient.buffers, strict=True):
            own.copy_(moved)
        if self._program.clip_norm is not None:
            square = self._summed(square_norm(self._counted))
            clip_by_square(self._gradient.parameters, square, self._program.clip_norm)
        if self._optimizer is not None:
            self._optimizer.step(self._gradient.parameters)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        assert self._own is not None, "finish before adopt"
        self._own.take_over()  # there were fewer steps than the overlap
        out.copy_(self._own.state)
        if not self._distance:
            self._own.subtract_read(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(out.parameters, 0.0))


@final
class WritesInPlace(_SteppingReplica):
    """Steps the A that it is given in place, with an optimizer of its own: Hogwild.

    A gradient that is not finite is not written: it would be everybody's in a moment, and each replica would report it.

    Args:
        program: gives loss, optimizer and scheduler.
        autograd: computes gradients.
    """

    def __init__(self, program: Program, autograd: Autograd) -> None:
        super().__init__(program, autograd, refuses=True)
        self._bound: FlatState | None = None
        self._restore: Callable[[FlatOptimizer], None] | None = None
        """What its optimizer begins with; None: nothing."""

    def chunks(self) -> list[TensorChunk]:
        """Return its optimizer's state; none before the first A."""
        return self._flat_optimizer.chunks() if self._flat_optimizer is not None else []

    def state_json(self) -> dict[str, Any] | None:
        """Return what of its optimizer is no tensor; None before the first A."""
        return self._flat_optimizer.state_json() if self._flat_optimizer is not None else None

    def restore(self, saved: Mapping[str, Any], source: TensorSource, layout: FlatLayout) -> None:
        """Go on from a checkpoint, with the A that comes first; ``saved`` is what :meth:`state_json` returned."""
        del layout
        self._restore = lambda optimizer: optimizer.restore(saved, source)

    def adopt(self, state: FlatState) -> None:
        if self._bound is not state:
            self._autograd.bind(state)
            self._begin(state)
            self._bound = state
            if self._restore is not None and self._flat_optimizer is not None:
                self._restore(self._flat_optimizer)
                self._restore = None
        self._losses, self._samples = 0.0, 0

    def finish(self, out: FlatState) -> Measured:
        del out  # A, which others write, too
        if not self._samples:
            return Measured(math.nan, 0, True)
        return Measured(self._losses / self._samples, self._samples, not self._refused)


def autograd_of(replica: Replica) -> Autograd | None:
    """Return what computes a replica's gradients where it has all of the model and calls its forward; else None."""
    return replica.autograd if isinstance(replica, (Single, LocalSGD, WritesInPlace)) else None
