"""The papers' formulas, one parameter after another, as they stand."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def norm(tensor: Tensor) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in tensor.flatten()))


class Literal(Optimizer):
    """Goes through the parameters; ``rule`` says what one becomes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    alone = not (group.get("exclude_vectors") and w.dim() <= 1)
                    w.copy_(self.rule(w, w.grad, self.state[w], group, alone))

    def rule(self, w: Tensor, g: Tensor, state: dict[str, Any], o: dict[str, Any], alone: bool) -> Tensor:
        raise NotImplementedError


class LiteralLars(Literal):
    """You, Gitman, Ginsburg 2017, algorithm 1."""

    def rule(self, w: Tensor, g: Tensor, state: dict[str, Any], o: dict[str, Any], alone: bool) -> Tensor:
        beta = o.get("weight_decay", 0.0) if alone else 0.0
        rate, trust = 1.0, o.get("trust", 0.001)
        if alone:
            both = norm(w) > 0 and norm(g) > 0
            rate = trust * norm(w) / (norm(g) + beta * norm(w)) if both else trust
        v, mu = state.get("v", torch.zeros_like(w)), o.get("momentum", 0.9)
        push = o["lr"] * rate * (g + beta * w)
        state["v"] = mu * v + push
        return w - (mu * state["v"] + push if o.get("nesterov") else state["v"])


class LiteralLamb(Literal):
    """You et al. 2019, algorithm 2, with φ(z) = z."""

    def rule(self, w: Tensor, g: Tensor, state: dict[str, Any], o: dict[str, Any], alone: bool) -> Tensor:
        beta1, beta2 = o.get("betas", (0.9, 0.999))
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(w)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(w)) + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + o.get("eps", 1e-6))
        step = r + (o.get("weight_decay", 0.0) * w if alone else 0.0)
        scaled = alone and norm(w) > 0 and norm(step) > 0
        return w - o["lr"] * (norm(w) / norm(step) if scaled else 1.0) * step
