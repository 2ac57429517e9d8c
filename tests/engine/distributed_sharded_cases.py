"""What ranks train with divided parameters; the oracles know nothing of it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.distributed_cases import (
    ACCUMULATED,
    LIKE_VIRTUAL,
    ONE_PROCESS,
    SYNCHRONISED,
    Case,
    over_all_ranks,
    program,
)


class Twice(nn.Module):
    """A layer that is called twice: gathered twice, and its gradient is summed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        once = torch.tanh(self.layers[0](x))
        return self.layers[1](torch.tanh(self.layers[0](once)))


class Attention(nn.Module):
    """Blocks whose attention reads the weight of a member without calling it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def divided(case: Case) -> Case:
    return replace(case, strategy=f"{case.strategy} shard_parameters=true")


def normalised(model: Any, settings: dict[str, Any]) -> Case:
    return Case(program(model=lambda: over_all_ranks(model)), settings=settings)


LAYERS = {"called twice": Case(program(model=Twice)), "attention": Case(program(model=Attention))}

EXACT = {name: case for name, case in (ONE_PROCESS | LAYERS).items() if name != "lamb"}
"""Equal to one process; Lamb is refused."""

VIRTUAL = {name: case for name, case in LIKE_VIRTUAL.items() if case.settings.get("on_nonfinite") != "skip"}
"""Equal to the virtual engine, record by record; skipping is refused."""

OVER_ALL_RANKS = {name: normalised(*model) for name, model in SYNCHRONISED.items()}

CASES = {name: divided(case) for name, case in (EXACT | ACCUMULATED | VIRTUAL | OVER_ALL_RANKS).items()}


def wide() -> nn.Module:
    """1.2 MB in float64, in layers whose rows 2, 3 and 4 ranks can share equally, but for 3 kB."""
    return nn.Sequential(nn.Linear(6, 1200), nn.Tanh(), nn.Linear(1200, 120), nn.Tanh(), nn.Linear(120, 3)).double()
