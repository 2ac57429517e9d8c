"""The common part of LARS and LAMB.

Both move each parameter by a step whose length is a given fraction of the parameter's own, so norms are those of whole
parameters. All arithmetic is on lists of tensors (``torch._foreach_*``, which torch's own optimizers use): a step costs
some twenty calls, however many parameters there are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import InputError


class LayerWise(Optimizer, ABC):
    """An optimizer of whole layers; subclasses move a group and check its options."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step and return the result of ``closure``, which computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            gradients = {p: p.grad for p in group["params"] if p.grad is not None}
            for parameter, gradient in gradients.items():
                if gradient.is_sparse:
                    raise InputError(
                        f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, but whole norms need "
                        "dense ones; write nn.Embedding(…, sparse=False)"
                    )
            if gradients:
                self.move(group, list(gradients), list(gradients.values()))
        return loss

    @abstractmethod
    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Make one step of the parameters of a group that have a gradient; gradients stay as they are."""

    @abstractmethod
    def check(self, group: dict[str, Any]) -> None:
        """Raise InputError if an option of a group is out of its range."""


def decays(group: dict[str, Any], parameters: Sequence[Tensor]) -> list[bool]:
    """Return whether each parameter decays and has a rate of its own: all but vectors, if the group excludes them."""
    return [not (group["exclude_vectors"] and p.dim() <= 1) for p in parameters]


def ratios(
    lengths: Sequence[Tensor],
    steps: Sequence[Tensor],
    own: Sequence[bool],
    ratio: Callable[[Tensor, Tensor], Tensor],
    *,
    otherwise: float,
) -> list[Tensor]:
    """Return the factor on each parameter's step: ``ratio`` of the two norms, or ``otherwise`` if one of them is 0.

    1 if a parameter has no rate of its own.
    """
    # On one tensor of all norms: a few calls, however many parameters there are.
    length, step = torch.stack(list(lengths)), torch.stack(list(steps))
    factors = torch.where((length > 0) & (step > 0), ratio(length, step), otherwise)
    return list(torch.where(torch.tensor(own, device=length.device), factors, 1.0).unbind())


def require(name: str, value: float, rule: str, *, holds: bool, instead: str) -> None:
    """Refuse what breaks a rule, or is no number."""
    if not (isinstance(value, int | float) and math.isfinite(value) and holds):
        raise InputError(f"{name}={value}, but it must be {rule}; write {name}={instead}")
