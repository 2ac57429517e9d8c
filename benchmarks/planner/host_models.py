"""Six small models on random data, one for each kind of thing that binds a step."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from kit.blocks import Attention, Perceptron, Residual
from torch import Tensor, nn

import paceline

SAMPLES = 16
"""Of a step, all replicas together."""

STEPS_OF_DATA = 8

WORDS = 20_000
"""Rows of the large embedding."""


class Mean(nn.Module):
    """[n, length, width] -> [n, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Gpt(nn.Module):
    """A decoder of two layers with learned places; its head shares the embedding's weight."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        made: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return made


class Inception(nn.Module):
    """Three branches side by side, joined by their channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, some = channels // 2, channels // 4
        self.one = nn.Conv2d(channels, one, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, some, 1), nn.ReLU(), nn.Conv2d(some, some, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(channels, some, 1), nn.ReLU(), nn.Conv2d(some, some, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(torch.cat([self.one(x), self.three(x), self.five(x)], 1))


class Model(NamedTuple):
    """What is trained, and the shapes of a sample and of its target."""

    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    target: tuple[int, ...] = ()
    words: int = 0
    """Inputs are whole numbers below; 0: they are real."""
    classes: int = 10
    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)

    def program(self, name: str, samples: int = SAMPLES) -> paceline.Program:
        """On random data: how long a step takes does not hang on it."""
        draw, many = torch.Generator().manual_seed(0), samples * STEPS_OF_DATA
        real = torch.randn(many, *self.input, generator=draw)
        inputs = torch.randint(self.words, (many, *self.input), generator=draw) if self.words else real
        targets = torch.randint(self.classes, (many, *self.target), generator=draw)
        return paceline.Program(
            model=self.make,
            loss=nn.functional.cross_entropy,
            optimizer=self.optimizer,
            train=(inputs, targets),
            global_batch_size=samples,
            metrics={},
            name=name,
        )


def perceptron(width: int = 512) -> nn.Module:
    """Eight products of matrices."""
    return nn.Sequential(Perceptron(width), Perceptron(width), nn.Linear(width, 10))


def transformer(width: int = 256) -> nn.Module:
    """Two layers over 64 places."""
    return nn.Sequential(Attention(width, 4), Attention(width, 4), Mean(), nn.Linear(width, 10))


def convolutions(channels: int = 128) -> nn.Module:
    """Three bottlenecks of ResNet."""
    body = [Residual(channels) for _ in range(3)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def gpt(words: int = 1000, length: int = 64, width: int = 128) -> nn.Module:
    """A small one."""
    return Gpt(words, length, width)


def embedding(words: int = WORDS) -> nn.Module:
    """Most of its parameters are rows of one table."""
    return nn.Sequential(nn.Embedding(words, 128), Mean(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))


def inception(channels: int = 64) -> nn.Module:
    """Two blocks of branches."""
    body = [Inception(channels) for _ in range(2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


ADAM = functools.partial(torch.optim.Adam, lr=1e-3)

MODELS = {
    "perceptron": Model(perceptron, (512,)),
    "transformer": Model(transformer, (64, 256), optimizer=ADAM),
    "convolutions": Model(convolutions, (128, 14, 14)),
    "gpt": Model(gpt, (64,), (64,), words=1000, classes=1000, optimizer=ADAM),
    "embedding": Model(embedding, (32,), words=WORDS),
    "inception": Model(inception, (64, 14, 14)),
    "tiny": Model(functools.partial(perceptron, 8), (8,)),
}
"""By name; the last one is for trying the benchmark itself."""
