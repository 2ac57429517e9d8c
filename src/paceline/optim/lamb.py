"""LAMB: AdamW with a learning rate of its own for each layer (You et al. 2019, arXiv 1904.00962)."""

from typing import Any, final

import torch
from torch import Tensor

from paceline.optim.layers import LayerWise, decays, ratios, require


@final
class Lamb(LayerWise):
    """Layer-wise adaptive moments: each parameter moves along Adam's direction by a fraction of its own norm.

    For each parameter w with gradient g at its t-th step, learning rate γ and weight decay λ (algorithm 2, φ(z) = z)::

        m = β1·m + (1 − β1)·g
        v = β2·v + (1 − β2)·g²
        r = (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + ε)
        w = w − γ · |w| / |r + λ·w| · (r + λ·w)

    Where ``|w|`` or ``|r + λ·w|`` is 0, the fraction is 1, as in the authors' code.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: γ, the fraction of its norm by which a parameter moves at each step.
        betas: (β1, β2).
        eps: ε.
        weight_decay: λ.
        exclude_vectors: biases and norms' scales (one dim or none) neither decay nor have a rate of their own.

    Raises:
        InputError: a number out of its range.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = Lamb([weight], lr=0.1, eps=0.0)
    >>> weight.grad = torch.tensor([0.001, 1000.0])
    >>> optimizer.step()
    >>> weight.data                                   # |w| was 5: it moved by 0.5, equally far along both
    tensor([2.6464, 3.6464])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        exclude_vectors: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"exclude_vectors": exclude_vectors})

    def move(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        states: list[dict[str, Any]] = [self.state[p] for p in parameters]
        for p, state in zip(parameters, states, strict=True):
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
        means, squares = [s["mean"] for s in states], [s["square"] for s in states]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # r: both moments are corrected for their start at 0, as in Adam.
        sizes = torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states])
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, group["eps"])
        steps = torch._foreach_div(means, [1 - beta1 ** s["step"] for s in states])
        torch._foreach_div_(steps, sizes)
        own = decays(group, parameters)
        torch._foreach_add_(steps, torch._foreach_mul(parameters, [group["weight_decay"] * o for o in own]))
        lengths, sizes = torch._foreach_norm(parameters), torch._foreach_norm(steps)
        rates = ratios(lengths, sizes, own, lambda length, size: length / size, otherwise=1.0)
        torch._foreach_mul_(steps, rates)
        torch._foreach_add_(parameters, steps, alpha=-group["lr"])

    def check(self, group: dict[str, Any]) -> None:
        require("lr", group["lr"], "0 or above", holds=group["lr"] >= 0, instead="0.001")
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            require(name, beta, "from 0 to below 1", holds=0 <= beta < 1, instead="0.9")
        require("eps", group["eps"], "0 or above", holds=group["eps"] >= 0, instead="1e-6")
        decay = group["weight_decay"]
        require("weight_decay", decay, "0 or above", holds=decay >= 0, instead="0.01")
