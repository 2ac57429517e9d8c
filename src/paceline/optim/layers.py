"""What LARS and LAMB share.

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
    """An optimizer of whole layers: it says how a group moves, and what may be asked of one."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            self.check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` does, which computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self.move(group, parameters, [_dense(p) for p in parameters])
        return loss

    @abstractmethod
    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of those parameters of a group that have a gradient; gradients stay as they are."""

    @abstractmethod
    def check(self, group: dict[str, Any]) -> None:
        """Raise InputError where an option of a group is out of its range."""


def _dense(parameter: Tensor) -> Tensor:
    """A parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, but whole norms need dense ones; "
            "write nn.Embedding(…, sparse=False)"
        )
    return gradient


def decays(group: dict[str, Any], parameters: Sequence[Tensor]) -> list[bool]:
    """Whether each parameter decays and has a rate of its own: all do, but vectors where the group leaves them out."""
    return [not (group["exclude_vectors"] and p.dim() <= 1) for p in parameters]


def ratios(
    lengths: Sequence[Tensor],
    steps: Sequence[Tensor],
    own: Sequence[bool],
    ratio: Callable[[Tensor, Tensor], Tensor],
    *,
    otherwise: float,
) -> list[Tensor]:
    """What each parameter's step is multiplied by: ``ratio`` of the two norms, or ``otherwise`` where one of them is 0.

    1 where a parameter has no rate of its own.
    """
    length, step = torch.stack(list(lengths)), torch.stack(list(steps))
    found = torch.where((length > 0) & (step > 0), ratio(length, step), otherwise)
    return list(torch.where(torch.tensor(own, device=length.device), found, 1.0).unbind())


def require(name: str, value: float, rule: str, *, holds: bool, instead: str) -> None:
    """Refuse what breaks a rule, or is no number."""
    if not (isinstance(value, int | float) and math.isfinite(value) and holds):
        raise InputError(f"{name}={value}, but it must be {rule}; write {name}={instead}")
