"""LARS: SGD with momentum and a rate of its own for each layer (You, Gitman, Ginsburg 2017, arXiv 1708.03888)."""

from typing import Any, final

import torch
from torch import Tensor

from paceline.optim.layers import LayerWise, decays, ratios, require


@final
class Lars(LayerWise):
    """Layer-wise adaptive rate scaling: each parameter moves by a fraction of its own norm.

    For each parameter w with gradient g, learning rate γ, momentum μ, weight decay β and trust η (algorithm 1)::

        λ = η·|w| / (|g| + β·|w|)
        v = μ·v + γ·λ·(g + β·w)
        w = w − v                        with nesterov:  w − (μ·v + γ·λ·(g + β·w))

    v holds learning rates, as in the paper and unlike torch's SGD: a new γ acts on new gradients only. Where ``|w|`` or
    ``|g|`` is 0, λ is η, as if both were equally long: a parameter that begins at 0 begins as under SGD with learning
    rate γ·η.
    (Of ``|w|`` = 0 the paper says nothing. Others take λ = 1, and γ alone is too large a rate for that.)

    Args:
        params: parameters, or groups of them with options of their own.
        lr: γ, the same for all layers and larger than SGD's, for it is multiplied by η.
        momentum: μ.
        weight_decay: β.
        trust: η, how far a layer may move, as a fraction of its norm; the paper's is 0.001.
        nesterov: look ahead by one step of momentum.
        exclude_vectors: biases and norms' scales (one dim or none) neither decay nor have a rate of their own: β = 0,
            λ = 1.

    Raises:
        InputError: a number out of its range.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lars([weight], lr=1.0, momentum=0.0, trust=0.1)
    >>> weight.grad = torch.tensor([0.0, 100.0])
    >>> optimizer.step()
    >>> weight.data                                              # |w| was 5, so it moved by 0.5
    tensor([3.0000, 3.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        exclude_vectors: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults | {"nesterov": nesterov, "exclude_vectors": exclude_vectors})

    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        own, decay, trust = decays(group, parameters), group["weight_decay"], group["trust"]
        rates = ratios(
            torch._foreach_norm(parameters),
            torch._foreach_norm(gradients),
            own,
            lambda length, slope: trust * length / (slope + decay * length),
            otherwise=trust,
        )
        pushes = torch._foreach_mul(parameters, [decay * o for o in own])
        torch._foreach_add_(pushes, gradients)
        torch._foreach_mul_(pushes, rates)
        # The rate goes into the velocity, as in the paper: a new rate then acts on new gradients only.
        torch._foreach_mul_(pushes, group["lr"])
        for p in parameters:
            if not self.state[p]:
                self.state[p]["velocity"] = torch.zeros_like(p)
        velocities = [self.state[p]["velocity"] for p in parameters]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, pushes)
        # μ·v + γ·λ·(g + β·w), of which the second term is in `pushes` already.
        if group["nesterov"]:
            torch._foreach_add_(pushes, velocities, alpha=group["momentum"])
        torch._foreach_sub_(parameters, pushes if group["nesterov"] else velocities)

    def check(self, group: dict[str, Any]) -> None:
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        require("lr", lr, "0 or above", holds=lr >= 0, instead="1.0")
        require("momentum", momentum, "from 0 to below 1", holds=0 <= momentum < 1, instead="0.9")
        require("weight_decay", decay, "0 or above", holds=decay >= 0, instead="1e-4")
        require("trust", group["trust"], "above 0", holds=group["trust"] > 0, instead="0.001")
        if group["nesterov"]:
            require("momentum", momentum, "above 0 with nesterov", holds=momentum > 0, instead="0.9")
