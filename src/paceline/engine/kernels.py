"""Steps of the most common optimizers on flat vectors, without what torch.optim spends around them.

Each does torch's own operations in torch's own order (``torch/optim/sgd.py`` and ``adam.py`` of 2.13, one tensor at a
time), so the bits are the same. On 22,000 parameters torch.optim's checks and hooks take longer than the arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


class Kernel(ABC):
    """The update rule of one optimizer on the vectors of A."""

    @abstractmethod
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Move A, with learning rate · ``rate``; the gradients stay as they are."""


def kernel_of(optimizer: Optimizer, vectors: Sequence[Tensor]) -> Kernel | None:
    """The kernel that does what ``optimizer`` does to A; None where torch.optim has to do it.

    That is so where it steps on anything but A's vectors, where somebody listens to its steps (a scheduler, a hook), or
    where an option of it has no place here.
    """
    groups = optimizer.param_groups
    if len(groups) != 1 or _places(groups[0]["params"]) != _places(vectors):
        return None
    group = groups[0]
    heard = "step" in vars(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    asked = any(group.get(name) for name in ("maximize", "differentiable", "amsgrad", "capturable", "foreach", "fused"))
    numbers = [group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "eps") if name in group]
    numbers += group.get("betas", ())
    odd = any(isinstance(number, Tensor) for number in numbers) or any(v.is_complex() for v in vectors)
    if heard or asked or odd:
        return None
    if type(optimizer) is SGD:
        return _Sgd(group, vectors)
    return _Adam(group, vectors) if type(optimizer) in (Adam, AdamW) else None


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.numel()) for t in tensors]


class _Sgd(Kernel):
    def __init__(self, group: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        self._group, self._vectors = group, vectors
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        group = self._group
        lr, decay = group["lr"] * rate, group["weight_decay"]
        if decay:
            gradients = [g.add(v, alpha=decay) for v, g in zip(self._vectors, gradients, strict=True)]
        if group["momentum"]:
            gradients = self._with_momentum(gradients)
        for vector, gradient in zip(self._vectors, gradients, strict=True):
            vector.add_(gradient, alpha=-lr)

    def _with_momentum(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        momentum, fresh = self._group["momentum"], 1 - self._group["dampening"]
        if not self._buffers:
            self._buffers = [g.clone() for g in gradients]
        else:
            for buffer, gradient in zip(self._buffers, gradients, strict=True):
                buffer.mul_(momentum).add_(gradient, alpha=fresh)
        if not self._group["nesterov"]:
            return self._buffers
        return [g.add(b, alpha=momentum) for b, g in zip(self._buffers, gradients, strict=True)]


class _Adam(Kernel):
    def __init__(self, group: dict[str, Any], vectors: Sequence[Tensor]) -> None:
        self._group, self._vectors = group, vectors
        self._means = [torch.zeros_like(v) for v in vectors]
        self._squares = [torch.zeros_like(v) for v in vectors]
        self._scratch = [torch.empty_like(v) for v in vectors]
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        group = self._group
        lr, decay, (beta1, beta2) = group["lr"] * rate, group["weight_decay"], group["betas"]
        self._steps += 1
        if decay:
            gradients = self._decayed(gradients, lr, decay)
        step_size = lr / (1 - beta1**self._steps)
        root = (1 - beta2**self._steps) ** 0.5
        for vector, gradient, mean, square, scratch in zip(
            self._vectors, gradients, self._means, self._squares, self._scratch, strict=True
        ):
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            torch.sqrt(square, out=scratch).div_(root).add_(group["eps"])
            vector.addcdiv_(mean, scratch, value=-step_size)

    def _decayed(self, gradients: Sequence[Tensor], lr: float, decay: float) -> Sequence[Tensor]:
        if not self._group["decoupled_weight_decay"]:
            return [g.add(v, alpha=decay) for v, g in zip(self._vectors, gradients, strict=True)]
        for vector in self._vectors:
            vector.mul_(1 - lr * decay)
        return gradients
