"""What is trained, on random data: speed does not hang on it. The same A_0 and the same batches on every side."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]

SEED = 0


class Task(NamedTuple):
    """A model and its data.

    Args:
        make: the model; to be called under a seed.
        data: so many samples, from a generator.
        loss: (output, target) -> the mean over a batch.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Data]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def built(self) -> nn.Module:
        """The model at A_0."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            return self.make()

    def batch(self, samples: int, rank: int) -> Data:
        """The one batch of a rank, fed again and again."""
        return self.data(samples, torch.Generator().manual_seed(rank))


def mlp() -> nn.Module:
    """784-2048-2048-10: 5.8M parameters, so communication is the bound."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    """The MNIST network of the Smooth Switch paper: 22k parameters, so computing is the bound."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Two layers of width 128 over 32 characters: 0.4M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(65, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 65)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(text)).mean(1))
        return logits


def _images(*shape: int) -> Callable[[int, torch.Generator], Data]:
    return lambda samples, draw: (
        torch.randn(samples, *shape, generator=draw),
        torch.randint(10, (samples,), generator=draw),
    )


def _text(samples: int, draw: torch.Generator) -> Data:
    return torch.randint(65, (samples, 32), generator=draw), torch.randint(65, (samples,), generator=draw)


MODELS = {
    "cnn": Task(cnn, _images(1, 28, 28)),
    "mlp": Task(mlp, _images(784)),
    "transformer": Task(Transformer, _text),
}

WIDTH = 100
"""Inputs of :func:`plain`."""


def plain(elements: int) -> Task:
    """One matrix of so many elements and a batch of one sample: nothing but the update and its transport takes time."""
    rows = elements // WIDTH

    def data(samples: int, draw: torch.Generator) -> Data:
        return torch.randn(samples, WIDTH, generator=draw), torch.randn(samples, rows, generator=draw)

    return Task(functools.partial(nn.Linear, WIDTH, rows, bias=False), data, nn.functional.mse_loss)


def task(name: str) -> Task:
    """By name: one of :data:`MODELS`, or ``plain:ELEMENTS``."""
    kind, _, elements = name.partition(":")
    return plain(int(elements)) if kind == "plain" else MODELS[name]


@functools.cache
def parameters(name: str) -> int:
    """|A|, how many a task has."""
    return sum(p.numel() for p in task(name).make().parameters())
