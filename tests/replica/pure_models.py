"""Models and losses as people write them, in float64, on six features and three classes: all of them are pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """Of a model, which keeps it."""

    tokens: int = 3
    width: int = 8
    heads: int = 2
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal attention among the tokens of a sample."""

    mask: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.drop = config, nn.Dropout(config.dropout)
        self.all, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.register_buffer("mask", torch.ones(config.tokens, config.tokens).tril() == 0)

    def forward(self, x: Tensor) -> Any:
        samples, tokens, width = x.size()
        assert tokens <= self.config.tokens, f"{tokens} tokens are more than {self.config.tokens}"
        apart = (samples, tokens, self.config.heads, width // self.config.heads)
        q, k, v = (each.view(*apart).transpose(1, 2) for each in self.all(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = F.softmax(scores.masked_fill(self.mask[:tokens, :tokens], float("-inf")), dim=-1)
        return self.out((self.drop(weights) @ v).transpose(1, 2).contiguous().view(samples, tokens, width))


class Transformer(nn.Module):
    """Tokens of two features each."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.parts = nn.ModuleDict(
            {
                "embedded": nn.Linear(2, self.config.width),
                "blocks": nn.ModuleList(Attention(self.config) for _ in range(2)),
                "norm": nn.LayerNorm(self.config.width),
            }
        )
        self.head = nn.Linear(self.config.width, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = self.parts.embedded(x.view(x.size(0), -1, 2))
        for block in self.parts.blocks:
            x = x + block(x)
        return self.head(self.parts.norm(x).mean(dim=1))


class Recurrent(nn.Module):
    """A cell that goes through the features, and notes what it has after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 4), nn.Linear(4, 3)
        self.double()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Any:
        if x.dim() != 2:
            raise ValueError(f"expected samples of features, got {x.dim()} dims")
        state = torch.zeros(x.size(0), 4, dtype=x.dtype, device=self.device)
        found = torch.zeros(x.size(0), x.size(1), 4, dtype=x.dtype)
        for number in range(x.size(1)):
            state = self.cell(x[:, number : number + 1], state)
            found[:, number] = state
        return self.head(found.mean(dim=1))


class Block(nn.Module):
    """Something to begin with."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.shortcut = (
            nn.Linear(inputs, outputs),
            None if inputs == outputs else nn.Linear(inputs, outputs),
        )

    @staticmethod
    def activated(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def forward(self, x: Tensor) -> Any:
        same = x if self.shortcut is None else self.shortcut(x)
        return self.activated(self.layer(x)) + same


class Normed(Block):
    """The same with a norm, and a scale without a gradient."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.std() + 1
        return self.norm(super().forward(x / scale))


class Residual(nn.Module):
    """Blocks, of which it knows the parts; it can log, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.widths = {"scale": 0.5, "drop": 0.1}, [6, 8, 8]
        self.blocks = nn.ModuleList(Normed(*each) for each in zip(self.widths, self.widths[1:], strict=False))
        self.head = nn.Linear(self.widths[-1], 3)
        self.double()

    def log(self, name: str, value: Tensor) -> None:
        print(name, value)

    def forward(self, x: Tensor) -> Any:
        found = {}
        for number, block in enumerate(self.blocks):
            x = block(x) * self.options["scale"]
            found[f"block {number}"] = F.dropout(block.norm(x), self.options["drop"], self.training)
        return {"logits": self.head(found["block 1"]), "hidden": x.view(-1, *self.widths[-1:])}


def weighted(hidden: float, classes: Tensor) -> Callable[[Any, Tensor], Tensor]:
    """Return a loss with these weights."""

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target, weight=classes) + hidden * output["hidden"].pow(2).mean()

    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "transformer": (Transformer, F.cross_entropy),
    "recurrent": (Recurrent, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "residual": (Residual, weighted(0.1, torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64))),
}
