"""Steps of the most common optimizers on flat vectors, without the overhead of torch.optim.

A kernel is a value: the numbers of one step, and nothing else. The optimizer's state is in vectors that are handed in,
so any process that maps them can make any slice of the step. SGD does torch's own operations in torch's own order
(``torch/optim/sgd.py`` of 2.13), so its bits are the same; Adam and AdamW are torch's fused kernel, which rounds as
``fused=True`` does. On 22,000 parameters torch.optim's checks and hooks take longer than the arithmetic.

A new kernel is a class of this file, in both of its tables.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as global_hooks

from paceline.device import CPU

# An optimizer's state of one vector: StepKernel.state_count vectors of the same form, zeros at first.
StateVectors: TypeAlias = Sequence[Tensor]

# Elements of a vector on which a step makes all of its passes before it goes on, so that they find them in the caches.
BLOCK = 2**18


@dataclass(slots=True)
class StepKernel(ABC):
    """One step of one optimizer.

    Args:
        number: the number of the step, 1 for the first.
        lr: learning rate, the update's own rate included.
    """

    number: int
    lr: float
    weight_decay: float
    slots: ClassVar[tuple[str, ...]]
    """Names that torch.optim gives the vectors of state, in their order."""

    @classmethod
    @abstractmethod
    def from_group(cls, group: Mapping[str, Any], number: int, rate: float) -> "StepKernel":
        """Return the kernel of a step from an optimizer's only group, with learning rate · ``rate``."""

    @property
    @abstractmethod
    def state_count(self) -> int:
        """Vectors of optimizer state for each vector of A."""

    @abstractmethod
    def step(
        self,
        before: Tensor,
        after: Tensor,
        gradient: Tensor,
        state: StateVectors,
        weight: float = 1.0,
        *,
        consumes: bool = False,
    ) -> None:
        """Step on ``weight`` · gradient.

        Args:
            before: A's vector.
            after: receives its new value; both may be one.
            gradient: of the same length.
            state: of this vector.
            weight: of the gradient.
            consumes: whether the gradient's own memory may be written, to save that of a copy; else it stays as it is.
        """


@dataclass(slots=True)
class SgdKernel(StepKernel):
    """Stochastic gradient descent."""

    momentum: float
    dampening: float
    nesterov: float
    slots = ("momentum_buffer",)

    @classmethod
    def from_group(cls, group: Mapping[str, Any], number: int, rate: float) -> "SgdKernel":
        momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
        return cls(number, group["lr"] * rate, group["weight_decay"], momentum, dampening, nesterov)

    @property
    def state_count(self) -> int:
        return int(self.momentum != 0)

    def step(
        self,
        before: Tensor,
        after: Tensor,
        gradient: Tensor,
        state: StateVectors,
        weight: float = 1.0,
        *,
        consumes: bool = False,
    ) -> None:
        size = BLOCK * torch.get_num_threads()
        if not self.momentum or before.device != CPU or before.numel() < 2 * size:
            self._step(before, after, gradient, state, weight, consumes=consumes)
            return
        parts = [torch.split(vector, size) for vector in (before, after, gradient, state[0])]
        for old, new, part, momentum in zip(*parts, strict=True):
            self._step(old, new, part, (momentum,), weight, consumes=consumes)

    def _step(
        self, before: Tensor, after: Tensor, gradient: Tensor, state: StateVectors, weight: float, *, consumes: bool
    ) -> None:
        own = gradient if consumes else None
        # Where the gradient is used once, the weight goes into the factor of that use: one pass less.
        if weight != 1.0 and (self.weight_decay or self.nesterov):
            gradient, weight = torch.mul(gradient, weight, out=own), 1.0
        if self.weight_decay:
            gradient = torch.add(gradient, before, alpha=self.weight_decay, out=own)
        if self.momentum:
            buffer = state[0]
            if self.number == 1:  # torch.optim.SGD copies the first gradient, without dampening
                torch.mul(gradient, weight, out=buffer)
            else:
                buffer.mul_(self.momentum).add_(gradient, alpha=(1 - self.dampening) * weight)
            if self.nesterov:
                gradient, weight = torch.add(gradient, buffer, alpha=self.momentum, out=own), 1.0
            else:
                gradient, weight = buffer, 1.0
        torch.add(before, gradient, alpha=-self.lr * weight, out=after)


@dataclass(slots=True)
class AdamKernel(StepKernel):
    """Adam, and with ``decoupled`` weight decay AdamW."""

    beta1: float
    beta2: float
    eps: float
    decoupled: float
    slots = ("exp_avg", "exp_avg_sq")
    state_count = 2

    @classmethod
    def from_group(cls, group: Mapping[str, Any], number: int, rate: float) -> "AdamKernel":
        (beta1, beta2), decoupled = group["betas"], group["decoupled_weight_decay"]
        return cls(number, group["lr"] * rate, group["weight_decay"], beta1, beta2, group["eps"], decoupled)

    def step(
        self,
        before: Tensor,
        after: Tensor,
        gradient: Tensor,
        state: StateVectors,
        weight: float = 1.0,
        *,
        consumes: bool = False,
    ) -> None:
        if weight != 1.0:
            gradient = torch.mul(gradient, weight, out=gradient if consumes else None)
        if after is not before:
            after.copy_(before)
        fused: Any = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        # Lists of vectors: parameters, gradients, both moments, their maxima (none).
        vectors: tuple[list[Tensor], ...] = [after], [gradient], [state[0]], [state[1]], []
        rates = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "weight_decay": self.weight_decay}
        steps = [torch.full((), float(self.number), device=after.device)]
        fused(*vectors, steps, **rates, eps=self.eps, amsgrad=False, maximize=False)


# All kernels; an encoded one begins with its index here.
KERNELS: tuple[type[StepKernel], ...] = (SgdKernel, AdamKernel)
KERNEL_OF: dict[type[Optimizer], type[StepKernel]] = {SGD: SgdKernel, Adam: AdamKernel, AdamW: AdamKernel}


def encode(kernel: StepKernel) -> list[float]:
    """Return a kernel as numbers, which another process can read."""
    return [float(KERNELS.index(type(kernel))), *map(float, astuple(kernel))]


def decode(numbers: Sequence[float]) -> StepKernel:
    """Return the kernel that was encoded; further numbers are ignored.

    >>> decode(encode(SgdKernel(3, 0.1, 0.0, 0.9, 0.0, 1.0))).momentum
    0.9
    """
    kind = KERNELS[int(numbers[0])]
    return kind(int(numbers[1]), *numbers[2 : len(fields(kind)) + 1])


def kernel_of(optimizer: Optimizer, vectors: Sequence[Tensor]) -> type[StepKernel] | None:
    """Return the kernel that does what ``optimizer`` does to A; None: torch.optim has to do it.

    It is None where the optimizer steps on anything but A's vectors, has hooks, or an option that no kernel knows.
    """
    groups = optimizer.param_groups
    # The same memory: an optimizer may have made parameters of its own.
    own, whole = ([(t.data_ptr(), t.numel()) for t in tensors] for tensors in (groups[0]["params"], vectors))
    if type(optimizer) not in KERNEL_OF or len(groups) != 1 or own != whole or any(v.is_complex() for v in vectors):
        return None
    group = groups[0]
    options = ("maximize", "differentiable", "amsgrad", "capturable", "foreach", "fused")
    numbers = [*group.get("betas", ()), *(value for name, value in group.items() if name != "params")]
    if any(group.get(name) for name in options) or any(isinstance(number, Tensor) for number in numbers):
        return None
    return None if "step" in vars(optimizer) or has_hooks(optimizer) else KERNEL_OF[type(optimizer)]


def has_hooks(optimizer: Optimizer) -> bool:
    """Return True if hooks observe an optimizer's steps."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, global_hooks._global_optimizer_pre_hooks, global_hooks._global_optimizer_post_hooks))
