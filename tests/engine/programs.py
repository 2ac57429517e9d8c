"""Small programs in float64, each with one feature that a parallel run could get wrong."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Program

SAMPLES = 50
"""With 3 replicas of 4 samples: four full rounds an epoch, and one in which 2 samples are left for 3 replicas."""


def data(features: int = 6, classes: int = 3, samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, features, generator=generator, dtype=dtype)
    return inputs, torch.randint(classes, (samples,), generator=generator)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def wide() -> nn.Module:
    """More than 600 parameters: enough for three parts of whole cache lines."""
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double()


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Two(nn.Module):
    """Takes two inputs, and one of its parameters is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(6, 3), nn.Linear(2, 3), nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return self.a(x) + self.b(extra)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def half_decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay and vectors don't: two groups, so A is not stepped on as one flat vector."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def program(**fields: Any) -> Program:
    """An MLP under SGD, batch 4, on 50 samples, but for the fields given."""
    given: dict[str, Any] = {
        "model": mlp,
        "loss": nn.functional.cross_entropy,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "train": data(),
        "batch_size": 4,
        "seed": 3,
    }
    return Program(**given | fields)


def extra() -> Tensor:
    return torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def with_tuple() -> Any:
    inputs, targets = data()
    return (inputs, extra()), targets


def with_dict() -> Any:
    inputs, targets = data()
    return {"extra": extra(), "x": inputs}, targets


class Rows(Dataset[Any]):
    """A map-style data set of one's own."""

    def __init__(self, data: Any) -> None:
        self.inputs, self.targets = data

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int, "torch's DataLoader gives ints"
        return self.inputs[index], self.targets[index]
