"""Many small gradients in one call: torch.func.vmap over the attempts that are under way.

The rule is fixed and never timed, so that a run is reproducible: when a Δ is needed that has not been computed, it is
computed together with the up to 31 others that have waited longest among those whose batch is as large. It is used
for models whose parameters all belong to Linear layers, at most 100,000 of them, without randomness or running buffers,
on data held as tensors; and only after it has given the gradients that autograd gives one at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from paceline.core.order import Order
from paceline.core.types import ReplicaId
from paceline.engine.nonfinite import refuse_nonfinite
from paceline.engine.virtual.attempts import Attempt, BatchAt, Computer
from paceline.program import Program, as_tensors
from paceline.replica.base import Measured, Replica, finite
from paceline.replica.state import Layout, State

MOST = 32
"""Gradients in one call."""

LARGEST = 100_000
"""Parameters, above which one call at a time is as fast."""


class Stacked(Computer):
    """Computes Δs up to :data:`MOST` at a time."""

    rule = f"vmap over up to {MOST} attempts that wait"

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        layout: Layout,
        order: Order,
        make: Callable[[ReplicaId], Replica],
        batch_at: BatchAt,
        *,
        stop: bool,
    ) -> None:
        super().__init__(make, batch_at, stop=stop)
        pair = as_tensors(program.train)
        assert pair is not None
        self._inputs, self._targets = pair
        self._order, self._stacked = order, StackedGradient(program, module, layout)
        self._waiting: dict[Attempt, int] = {}

    def begin(self, attempt: Attempt) -> None:
        self._waiting[attempt] = self._order.size(attempt.replica, attempt.first_micro_step)

    def forget(self, attempt: Attempt) -> None:
        self._waiting.pop(attempt, None)

    def compute(self, attempt: Attempt) -> State:
        if attempt.measured is None:
            samples = self._waiting.pop(attempt)
            if not samples:
                return super().compute(attempt)
            companions = self._companions(samples)
            try:
                self._together([attempt, *companions], samples)
            except Exception:  # somebody's batch is bad; one at a time it shows whose
                self._waiting |= dict.fromkeys(companions, samples)
                return super().compute(attempt)
        assert attempt.out is not None
        assert attempt.measured is not None
        if self._stop:
            refuse_nonfinite(attempt.measured, attempt.replica, attempt.clock)
        return attempt.out

    def _companions(self, samples: int) -> list[Attempt]:
        chosen: list[Attempt] = []
        for other, size in self._waiting.items():
            if size == samples:
                chosen.append(other)
                if len(chosen) == MOST - 1:
                    break
        for other in chosen:
            del self._waiting[other]
        return chosen

    def _together(self, attempts: list[Attempt], samples: int) -> None:
        rows = [torch.from_numpy(self._order.batch(a.replica, a.first_micro_step)) for a in attempts]
        index = torch.cat(rows)
        shape = (len(attempts), samples)
        inputs = self._inputs[index].view(*shape, *self._inputs.shape[1:])
        targets = self._targets[index].view(*shape, *self._targets.shape[1:])
        gradients, losses = self._stacked([a.read for a in attempts], inputs, targets)
        sums = gradients.sum(1).tolist()
        for attempt, gradient, loss, total in zip(attempts, gradients.unbind(), losses.tolist(), sums, strict=True):
            attempt.out = State(attempt.read.layout, [gradient.clone()], [])
            good = total - total == 0.0 and loss - loss == 0.0
            attempt.measured = Measured(loss, samples, good or finite([gradient], loss))


class StackedGradient:
    """Gradients of the mean loss at several A, each on its own batch.

    Called with B states, inputs [B, b, ...] and targets [B, b, ...]; returns gradients [B, |A|] and losses [B].
    """

    def __init__(self, program: Program, module: nn.Module, layout: Layout) -> None:
        self._entries = layout.parameters[0].entries

        def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return program.loss(functional_call(module, parameters, (inputs,)), targets)

        self._function = vmap(grad_and_value(loss))

    def __call__(self, states: list[State], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        flat = torch.stack([s.parameters[0] for s in states])
        stacked = {e.name: flat[:, e.start : e.stop].view(len(states), *e.shape) for e in self._entries}
        gradients, losses = self._function(stacked, inputs, targets)
        return torch.cat([gradients[e.name].flatten(1) for e in self._entries], 1), losses


def stackable(program: Program, module: nn.Module, layout: Layout, order: Order | None) -> bool:
    """Whether the rule of this file applies to a program."""
    if order is None or layout.buffers or len(layout.parameters) != 1 or program.precision != "fp32":
        return False
    pair = as_tensors(program.train) if not program.loader else None
    if pair is None or not all(isinstance(part, Tensor) for part in pair):
        return False
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    small = layout.parameters[0].elements <= LARGEST
    return small and all(type(m) is nn.Linear for m in owners) and _agrees(program, module, layout, pair, order)


def _agrees(program: Program, module: nn.Module, layout: Layout, pair: tuple[Tensor, Tensor], order: Order) -> bool:
    """Whether one stacked call of two gives, to rounding, what autograd gives one at a time.

    The bound is 100 rounding errors of the dtype, relative to the largest element: both sum the same products.
    """
    from paceline.replica.state import read

    state = read(module, layout.new())
    halves = [torch.from_numpy(order.batch(0, k)) for k in (0, 1)]
    if len({len(h) for h in halves}) != 1 or not len(halves[0]):
        halves = [halves[0], halves[0]]
    inputs, targets = (torch.stack([part[h] for h in halves]) for part in pair)
    try:
        with torch.random.fork_rng(devices=[]):
            stacked, _ = StackedGradient(program, module, layout)([state, state], inputs, targets)
    except RuntimeError:  # vmap refuses randomness and what has no batching rule
        return False
    parameters = [p for p in module.parameters() if p.requires_grad]
    for row, x, y in zip(stacked, inputs, targets, strict=True):
        alone = torch.autograd.grad(program.loss(module(x), y), parameters)
        expected = torch.cat([g.flatten() for g in alone])
        if (row - expected).abs().max() > 100 * torch.finfo(row.dtype).eps * max(1.0, float(expected.abs().max())):
            return False
    return True
