"""Small gradients of several attempts in one batched call, each at its own A and on its own batch.

The rule is fixed and never timed, so that a run is reproducible: when a Δ is needed that has not been computed, it is
computed together with the up to 31 others that have waited longest among those whose batch is as large. It is used
for an nn.Sequential of Linear layers and elementwise activations with at most 100,000 parameters, all of them trained,
on data held as tensors; and only after it has returned the gradients that autograd returns one at a time.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from paceline.core.data_order import DataOrder
from paceline.core.delta import Gradient
from paceline.core.types import ReplicaId
from paceline.device import CPU
from paceline.engine.loop import nonfinite_error
from paceline.engine.run_context import RunContext
from paceline.engine.virtual.pending_delta import BatchAt, BatchSources, DeltaComputer, PendingDelta
from paceline.program import LossFunction, Program, Tree, apart, as_tensors
from paceline.replica.base import Measured, Replica
from paceline.replica.flat_state import FlatLayout, FlatState, finite, read

# Bound on the gradients of one call.
MOST = 32

# Bound on the parameters; with more, one call at a time is as fast.
LARGEST = 100_000

# Layers that take a tensor of any number of dims.
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Identity)


class VmapComputer(DeltaComputer):
    """Computes Δs up to :data:`MOST` at a time.

    Args:
        gradient: computes them.
        order: of the data.
        build: builds the replica of an id, for those that are computed one at a time.
        batch_at: the data.
        stop: True if a Δ that is not finite ends the run.
    """

    rule = f"up to {MOST} attempts that wait in one call"

    def __init__(
        self,
        gradient: "StackedGradient",
        order: DataOrder,
        build: Callable[[ReplicaId], Replica],
        batch_at: BatchAt,
        *,
        stop: bool,
    ) -> None:
        super().__init__(build, batch_at, stop=stop)
        self._gradient, self._order = gradient, order
        self._waiting: dict[PendingDelta, int] = {}
        """Attempts that are not computed -> samples of their batch."""

    def begin(self, attempt: PendingDelta) -> None:
        self._waiting[attempt] = self._order.size(attempt.batches.stream, attempt.batches.first)

    def forget(self, attempt: PendingDelta) -> None:
        self._waiting.pop(attempt, None)

    def compute(self, attempt: PendingDelta) -> FlatState:
        if attempt.measured is None:
            samples = self._waiting.pop(attempt)
            if not samples:
                return super().compute(attempt)
            # Oldest first: a dict keeps the order in which attempts began.
            companions = list(islice((other for other, n in self._waiting.items() if n == samples), MOST - 1))
            for other in companions:
                del self._waiting[other]
            attempts = [attempt, *companions]
            try:
                rows = [self._order.batch(a.batches.stream, a.batches.first) for a in attempts]
                index, shape = torch.from_numpy(np.concatenate(rows)), (len(attempts), samples)
                inputs, targets = (part[index].view(*shape, *part.shape[1:]) for part in self._gradient.data)
                gradients, losses = self._gradient([a.pull() for a in attempts], inputs, targets)
                sums = gradients.sum(1).tolist()
            except Exception:  # a batch is bad; computed one at a time, its replica is named
                self._waiting |= dict.fromkeys(companions, samples)
                return super().compute(attempt)
            for each, gradient, loss, total in zip(attempts, gradients.unbind(), losses.tolist(), sums, strict=True):
                # A copy: a view would keep the gradients of all companions in memory.
                each.out = FlatState(each.pull().layout, [gradient.clone()], [])
                finite_sum = total - total == 0.0 and loss - loss == 0.0  # x - x is NaN where x is not finite
                each.push(Measured(loss, samples, finite_sum or finite([gradient], loss)))
        assert attempt.out is not None
        assert attempt.measured is not None
        if self._stop and not attempt.measured.finite:
            raise nonfinite_error(attempt.measured.loss, attempt.replica, attempt.clock)
        return attempt.out


class StackedGradient:
    """Gradients of the mean loss at several A, each on its own batch.

    Called with B states, inputs [B, b, features] and targets [B, b, ...]; returns gradients [B, |A|] and losses [B].
    """

    def __init__(self, program: Program, module: nn.Sequential, layout: FlatLayout) -> None:
        self._layers, self._entries = list(module), layout.parameters[0].entries
        pair = as_tensors(program.train)
        assert pair is not None, "the data are tensors"
        self.data = pair
        self._losses = _loss_of_each(program.loss, pair[1])

    def __call__(self, states: list[FlatState], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.stack([s.parameters[0] for s in states])
        stacked = [flat[:, e.start : e.stop].view(len(states), *e.shape).requires_grad_() for e in self._entries]
        losses = self._losses(self._forward(inputs, iter(stacked)), targets)
        gradients = torch.autograd.grad(losses.sum(), stacked)
        return torch.cat([g.flatten(1) for g in gradients], 1), losses.detach()

    def _forward(self, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
        for layer in self._layers:
            if not isinstance(layer, nn.Linear):
                x = layer(x)
            elif layer.bias is None:
                x = torch.bmm(x, next(parameters).mT)
            else:
                weight, bias = next(parameters), next(parameters)
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        return x


def _loss_of_each(loss: LossFunction, targets: Tree) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from [B, b, ...] outputs and targets to B mean losses.

    If a loss is the plain mean over its samples for any batch, the mean is taken here, at half the cost of a call
    through vmap. Other losses may divide by something else: class weights, targets that are not ignored.
    """
    plain_mean = loss in (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
    if loss in (F.cross_entropy, F.nll_loss) and isinstance(targets, Tensor) and not targets.is_floating_point():
        plain_mean = bool((targets >= 0).all())  # no target is ignored
    if not plain_mean:
        return vmap(loss)
    by_sample = functools.partial(cast(Callable[..., Tensor], loss), reduction="none")
    return lambda output, target: by_sample(output.flatten(0, 1), target.flatten(0, 1)).view(len(output), -1).mean(1)


def delta_computer(context: RunContext, module: nn.Module, layout: FlatLayout, sources: BatchSources) -> DeltaComputer:
    """Return what computes the Δs of a run, several at a time where the rule of this file applies.

    Args:
        context: of the run.
        module: the model, in which Δs are computed.
        layout: of A.
        sources: of batches that have no order, or that a DataLoader's workers read.
    """
    job, order = context.job, context.order
    stop, late = job.on_nonfinite == "stop", context.reads_late
    one = context.device(0)  # since all replicas train one module

    def build(replica: ReplicaId) -> Replica:
        own = module if job.loop is None else job.program.build()  # a loop's gradients are in its model
        return context.replica(replica, own, layout, device=one, late=late)

    if order is None or job.program.loader.get("num_workers"):
        return DeltaComputer(build, sources.at, stop=stop)
    batch_at = context.batches().at
    one_replica = job.loop is not None or job.strategy.device != CPU.type or job.strategy.compile
    if isinstance(context.delta, Gradient) and not one_replica:
        gradient = stacked_gradient(module, job.program, layout, order)
        if gradient is not None:
            return VmapComputer(gradient, order, build, batch_at, stop=stop)
    return DeltaComputer(build, batch_at, stop=stop)


def stacked_gradient(
    module: nn.Module, program: Program, layout: FlatLayout, order: DataOrder
) -> StackedGradient | None:
    """Return what computes a program's gradients in one call; None where the rule of this file does not apply."""
    pair = as_tensors(program.train) if not program.loader else None
    if pair is None or program.precision != "fp32" or type(module) is not nn.Sequential:
        return None
    if not all(isinstance(part, Tensor) for part in pair) or pair[0].dim() != 2:
        return None
    if len(layout.parameters) != 1 or layout.parameters[0].elements > LARGEST or layout.buffers:
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
    if hooked or any(type(layer) not in (nn.Linear, *ELEMENTWISE) for layer in module):
        return None
    # A must be the weights and biases of the Linear layers, in order, and all of them trained.
    names = [f"{layer}.{name}" for layer, each in module.named_children() for name, _ in each.named_parameters()]
    if names != [entry.name for entry in layout.parameters[0].entries]:
        return None
    trial = replace(program, loss=apart(program.loss))
    agrees = _agrees(StackedGradient(trial, module, layout), trial, module, layout, order)
    return StackedGradient(program, module, layout) if agrees else None


def _agrees(
    gradient: StackedGradient, program: Program, module: nn.Sequential, layout: FlatLayout, order: DataOrder
) -> bool:
    """Return whether one call for two batches has the losses and gradients that autograd has one at a time.

    The bound is 100 rounding errors of the dtype, relative to the largest element: both sum the same products.
    """
    state = read(module, layout.new())
    halves = [torch.from_numpy(order.batch(0, k)) for k in (0, 1)]
    if len({len(h) for h in halves}) != 1 or not len(halves[0]):
        halves = [halves[0], halves[0]]
    inputs, targets = (torch.stack([part[h] for h in halves]) for part in gradient.data)
    try:
        gradients, losses = gradient([state, state], inputs, targets)
    except Exception:  # the loss is random or does not take such a call; one at a time it may work
        return False
    parameters = list(module.parameters())
    for result, result_loss, x, y in zip(gradients, losses, inputs, targets, strict=True):
        loss = program.loss(module(x), y)
        alone = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        for one, expected in ((result, alone), (result_loss, loss.detach())):
            bound = 100 * torch.finfo(one.dtype).eps * max(1.0, float(expected.abs().max()))
            if one.shape != expected.shape or not (one - expected).abs().max() <= bound:  # NaN is no agreement
                return False
    return True
