"""An optimizer at work on a state: as one flat vector for each dtype where that comes to the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import PacelineError
from paceline.program import leaves
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.optimizer_kernels import StepKernel, hooked, rule_of

Make: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
"""Optimizers that treat each element alone and make their state at the first step: on A as one flat vector they do to
the bit what they do on its tensors, in a fraction of the time."""


class FlatOptimizer:
    """Moves a state by gradients.

    Args:
        make: the optimizer.
        schedule: its scheduler, stepped with it.
        state: what it moves; its values are nobody's business here.
        gradient: of the same layout; where a gradient has to be written, unless :attr:`takes_any`.
    """

    def __init__(
        self, make: Make, schedule: Callable[[Any], LRScheduler] | None, state: FlatState, gradient: FlatState
    ) -> None:
        self._here, self._gradient = state, gradient
        self._optimizer, self._targets = _optimizer(make, state, gradient)
        self._rule = rule_of(self._optimizer, state.parameters)
        self.adaptive = isinstance(self._optimizer, torch.optim.Adam)
        """Whether steps are divided by second moments: :meth:`second_moments`."""
        self._scheduler = schedule(self._optimizer) if schedule else None
        if hooked(self._optimizer):
            self._rule = None
        if self._rule is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else the scheduler warns of no step
        self.remembers = self._rule.remembers if self._rule is not None else 0
        """How many vectors of memory there are for each vector of the state."""
        self.memory = [[torch.zeros_like(v) for _ in range(self.remembers)] for v in state.parameters]
        """What the optimizer remembers, for each vector of the state; where a kernel makes its steps."""
        self.steps = 0
        """How many have been made."""

    @property
    def nbytes(self) -> int:
        """Of what the optimizer remembers."""
        by_torch = leaves(list(self._optimizer.state.values()))
        return sum(tensor.nbytes for tensor in [*by_torch, *(m for each in self.memory for m in each)])

    @property
    def takes_any(self) -> bool:
        """Whether gradients may lie anywhere, and a step may be made in parts: a kernel makes it."""
        return self._rule is not None

    @property
    def layout(self) -> FlatLayout:
        """Of what is moved."""
        return self._here.layout

    def second_moments(self) -> Iterator[tuple[Tensor, float, dict[str, Any]]]:
        """Of Adam and AdamW: v of each vector or of each tensor in turn, how many steps made it, its group's options.

        None of them before the first step, nor under other optimizers.
        """
        if not self.adaptive:
            return
        if self._rule is not None:
            yield from (
                (memory[1], self.steps, self._optimizer.param_groups[0]) for memory in self.memory if self.steps
            )
            return
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for parameter in self._targets.parameters:
            if state := self._optimizer.state.get(parameter):
                v = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                yield v, float(state["step"]), groups[id(parameter)]

    def point_at(self, state: FlatState) -> None:
        """What lies there is moved from now on."""
        self._here = state
        self._targets.point_at(state)

    def kernel(self, rate: float = 1.0) -> StepKernel:
        """That of the next step, which counts as made; its maker calls :meth:`moved`."""
        assert self._rule is not None, "no kernel makes this optimizer's steps"
        self.steps += 1
        kernel = self._rule.kernel(self.steps, rate)
        if kernel.remembers > self.remembers:
            raise PacelineError(
                f"momentum was 0 when training began and is above that at step {self.steps}, so it has no memory; "
                "write a momentum above 0 from the start, as torch.optim.SGD(parameters, lr=…, momentum=1e-9)"
            )
        return kernel

    def step(
        self, gradients: Sequence[Tensor], rate: float = 1.0, out: FlatState | None = None, weight: float = 1.0
    ) -> None:
        """One step, with learning rate · ``rate``; ``out`` becomes what is moved, None: it is moved where it lies.

        Gradients count ``weight`` times, which may be other than 1 where :attr:`takes_any`.
        """
        there = out or self._here
        if self._rule is None:
            self._step_by_torch(rate, there)
        else:
            kernel = self.kernel(rate)
            for i, gradient in enumerate(gradients):
                kernel.step(self._here.parameters[i], there.parameters[i], gradient, self.memory[i], weight)
        self.moved(there)

    def step_by_tensor(self, gradients: Sequence[Tensor], rate: float = 1.0, weight: float = 1.0) -> None:
        """As :meth:`step` where the state lies, on a gradient for each tensor, where :attr:`takes_any`."""
        kernel = self.kernel(rate)
        for (here, memory), gradient in zip(self._pieces(), gradients, strict=True):
            kernel.step(here, here, gradient.reshape(-1), memory, weight)
        self.moved(self._here)

    def _pieces(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each tensor as a vector, and what the optimizer remembers of it."""
        for block, vector, memory in zip(self._here.layout.parameters, self._here.parameters, self.memory, strict=True):
            for entry in block.entries:
                yield vector[entry.start : entry.stop], [m[entry.start : entry.stop] for m in memory]

    def moved(self, there: FlatState) -> None:
        """The state lies there now, and the schedule goes on."""
        self._here = there
        if self._scheduler is not None:
            self._scheduler.step()

    def _step_by_torch(self, rate: float, there: FlatState) -> None:
        if there is not self._here:
            torch._foreach_copy_(there.parameters, self._here.parameters)
            self._targets.point_at(there)
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * rate
        self._optimizer.step()
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


class FlatParams:
    """The parameters that an optimizer steps on: a state's vectors, or their tensors; their ``grad`` is one state's.

    Args:
        state: of the parameters.
        gradient: of the same layout.
        flat: whether they are whole vectors.
    """

    def __init__(self, state: FlatState, gradient: FlatState, *, flat: bool) -> None:
        self._flat = flat
        self.parameters = [nn.Parameter(tensor) for tensor in self._tensors(state)]
        for parameter, tensor in zip(self.parameters, self._tensors(gradient), strict=True):
            parameter.grad = tensor

    def point_at(self, state: FlatState) -> None:
        """From now on the optimizer steps on this one."""
        for parameter, tensor in zip(self.parameters, self._tensors(state), strict=True):
            parameter.data = tensor

    def _tensors(self, state: FlatState) -> list[Tensor]:
        return state.parameters if self._flat else state.views.parameters


def _optimizer(make: Make, state: FlatState, gradient: FlatState) -> tuple[Optimizer, FlatParams]:
    targets = FlatParams(state, gradient, flat=False)
    optimizer = make(targets.parameters)
    groups = optimizer.param_groups
    whole = len(groups) == 1 and len(groups[0]["params"]) == len(targets.parameters)
    if whole and type(optimizer) in ELEMENTWISE and not optimizer.state:
        targets = FlatParams(state, gradient, flat=True)
        groups[0]["params"] = targets.parameters
    return optimizer, targets


def stand_ins(layout: FlatLayout) -> dict[str, nn.Parameter]:
    """Parameters of a layout's names and shapes without values, to see what an optimizer makes of them."""
    entries = [(entry, block.dtype) for block in layout.parameters for entry in block.entries]
    return {e.name: nn.Parameter(torch.zeros((), dtype=dtype).expand(e.shape)) for e, dtype in entries}


def elementwise(make: Make, whole: FlatLayout) -> bool:
    """Whether an optimizer treats each element of A alone, and all alike."""
    optimizer = make(list(stand_ins(whole).values()))
    groups = optimizer.param_groups
    alike = len(groups) == 1 and len(groups[0]["params"]) == len(whole.parameter_names)
    return alike and type(optimizer) in ELEMENTWISE and not optimizer.state


def of_vectors(make: Make, whole: FlatLayout) -> Make:
    """The optimizer of vectors that lie anywhere in A, where it is :func:`elementwise`: its only group is that of A."""

    def made(vectors: list[nn.Parameter]) -> Optimizer:
        optimizer = make(list(stand_ins(whole).values()))
        optimizer.param_groups[0]["params"] = list(vectors)
        return optimizer

    return made


def of_part(make: Make, whole: FlatLayout, part: FlatLayout) -> Make:
    """The optimizer of a part of A: its groups are those that it makes of all parameters, in their order and shapes.

    So it may treat parameters differently by their place or shape. Those of other parts are without values.
    """

    def made(parameters: list[nn.Parameter]) -> Optimizer:
        own = dict(zip(part.parameter_names, parameters, strict=True))
        absent = stand_ins(whole)
        optimizer = make([own.get(name, parameter) for name, parameter in absent.items()])
        stands_for = {id(parameter): parameter for parameter in parameters}
        if any(parameter.shape != absent[name].shape for name, parameter in own.items()):
            # Memory is made for what there is of a tensor, groups by its whole shape.
            optimizer.param_groups = make(list(absent.values())).param_groups
            stands_for = {id(absent[name]): parameter for name, parameter in own.items()}
        for group in optimizer.param_groups:
            group["params"] = [stands_for[id(p)] for p in group["params"] if id(p) in stands_for]
        for parameter in absent.values():
            optimizer.state.pop(parameter, None)
        return optimizer

    return made
