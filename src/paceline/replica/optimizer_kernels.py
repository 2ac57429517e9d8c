"""Steps of the most common optimizers on flat vectors, without what torch.optim spends around them.

A kernel is a value: the numbers of one step, and nothing else. What the optimizer remembers from step to step lies in
vectors that are handed in, so any process that sees them can make any part of the step. SGD does torch's own operations
in torch's own order (``torch/optim/sgd.py`` of 2.13), so its bits are the same; Adam and AdamW are torch's fused
kernel, which rounds as ``fused=True`` does. On 22,000 parameters torch.optim's checks and hooks take longer than the
arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as everyones

Memory: TypeAlias = Sequence[Tensor]
"""What an optimizer remembers of one vector: ``StepKernel.remembers`` vectors of the same form, zeros at first."""


@dataclass(slots=True)
class StepKernel(ABC):
    """One step of one optimizer."""

    number: int
    """Which step it is, 1 for the first."""
    lr: float
    """Learning rate, the update's own rate included."""
    weight_decay: float

    @property
    @abstractmethod
    def remembers(self) -> int:
        """How many vectors of memory it needs for each vector of A."""

    @abstractmethod
    def step(self, here: Tensor, there: Tensor, gradient: Tensor, memory: Memory, weight: float = 1.0) -> None:
        """Step on ``weight`` · gradient, which itself stays as it is.

        Args:
            here: A's vector.
            there: what it becomes is written into it; both may be one.
            gradient: of the same length.
            memory: of this vector.
            weight: of the gradient.
        """


@dataclass(slots=True)
class SgdKernel(StepKernel):
    """Stochastic gradient descent."""

    momentum: float
    dampening: float
    nesterov: float

    @property
    def remembers(self) -> int:
        return int(self.momentum != 0)

    def step(self, here: Tensor, there: Tensor, gradient: Tensor, memory: Memory, weight: float = 1.0) -> None:
        if weight != 1.0 and (self.weight_decay or self.nesterov):
            gradient, weight = gradient * weight, 1.0
        if self.weight_decay:
            gradient = gradient.add(here, alpha=self.weight_decay)
        if self.momentum:
            gradient, weight = self._with_momentum(gradient, memory[0], weight), 1.0
        torch.add(here, gradient, alpha=-self.lr * weight, out=there)

    def _with_momentum(self, gradient: Tensor, buffer: Tensor, weight: float) -> Tensor:
        if self.number == 1:
            torch.mul(gradient, weight, out=buffer)
        else:
            buffer.mul_(self.momentum).add_(gradient, alpha=(1 - self.dampening) * weight)
        return gradient.add(buffer, alpha=self.momentum) if self.nesterov else buffer


@dataclass(slots=True)
class AdamKernel(StepKernel):
    """Adam, and with ``decoupled`` AdamW."""

    beta1: float
    beta2: float
    eps: float
    decoupled: float

    @property
    def remembers(self) -> int:
        return 2

    def step(self, here: Tensor, there: Tensor, gradient: Tensor, memory: Memory, weight: float = 1.0) -> None:
        if weight != 1.0:
            gradient = gradient * weight
        if there is not here:
            there.copy_(here)
        step = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        step(
            [there],
            [gradient],
            [memory[0]],
            [memory[1]],
            [],
            [torch.tensor(float(self.number))],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


KINDS: tuple[type[StepKernel], ...] = (SgdKernel, AdamKernel)


def encode(kernel: StepKernel) -> list[float]:
    """A kernel as numbers, which another process can read."""
    return [float(KINDS.index(type(kernel))), *map(float, astuple(kernel))]


def decode(numbers: Sequence[float]) -> StepKernel:
    """The kernel that was encoded; further numbers are ignored.

    >>> decode(encode(SgdKernel(3, 0.1, 0.0, 0.9, 0.0, 1.0))).momentum
    0.9
    """
    kind = KINDS[int(numbers[0])]
    return kind(int(numbers[1]), *numbers[2 : len(kind.__dataclass_fields__) + 1])


class KernelFactory:
    """Makes the kernel of each step from what an optimizer's only group says at that moment."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._group: dict[str, Any] = optimizer.param_groups[0]
        self._sgd = type(optimizer) is SGD

    @property
    def remembers(self) -> int:
        """As the kernels', once the scheduler has been made."""
        return int(self._group["momentum"] != 0) if self._sgd else 2

    def kernel(self, number: int, rate: float) -> StepKernel:
        """The kernel of the step of this number, with learning rate · ``rate``."""
        group = self._group
        lr, decay = group["lr"] * rate, group["weight_decay"]
        if self._sgd:
            return SgdKernel(number, lr, decay, group["momentum"], group["dampening"], group["nesterov"])
        beta1, beta2 = group["betas"]
        return AdamKernel(number, lr, decay, beta1, beta2, group["eps"], group["decoupled_weight_decay"])


def rule_of(optimizer: Optimizer, vectors: Sequence[Tensor]) -> KernelFactory | None:
    """The rule that does what ``optimizer`` does to A; None where torch.optim has to do it.

    That is so where it steps on anything but A's vectors, where somebody listens to its steps, or where an option of it
    has no place here.
    """
    groups = optimizer.param_groups
    if len(groups) != 1 or _places(groups[0]["params"]) != _places(vectors):
        return None
    group = groups[0]
    heard = "step" in vars(optimizer) or hooked(optimizer)
    asked = any(group.get(name) for name in ("maximize", "differentiable", "amsgrad", "capturable", "foreach", "fused"))
    numbers = [group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "eps") if name in group]
    numbers += group.get("betas", ())
    odd = any(isinstance(number, Tensor) for number in numbers) or any(v.is_complex() for v in vectors)
    if heard or asked or odd:
        return None
    return KernelFactory(optimizer) if type(optimizer) in (SGD, Adam, AdamW) else None


def hooked(optimizer: Optimizer) -> bool:
    """Whether somebody listens to an optimizer's steps."""
    its_own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*its_own, everyones._global_optimizer_pre_hooks, everyones._global_optimizer_post_hooks))


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.numel()) for t in tensors]
