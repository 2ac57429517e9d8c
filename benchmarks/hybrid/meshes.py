"""The meshes of so many workers, and the small transformer that each of them trains."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from kit.blocks import Attention
from torch import Tensor, nn

import paceline

SEED = 3
WORDS, LENGTH, WIDTH, HEADS, LAYERS = 512, 64, 128, 4, 4
SAMPLES = 32
"""Of a step, by all replicas together."""

MICRO_BATCHES = 4
"""Of a pipeline's step."""


class Mesh(NamedTuple):
    """replicas × stages × shards."""

    replicas: int
    stages: int
    shards: int

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.replicas * self.stages * self.shards

    @property
    def strategy(self) -> str:
        """As Paceline writes it."""
        micro = f" micro_batches={MICRO_BATCHES}" if self.stages > 1 else ""
        return f"replicas={self.replicas} stages={self.stages} shards={self.shards}{micro} threads=1"


def meshes(workers: int) -> Iterator[Mesh]:
    """All of them, those of most replicas first.

    >>> [tuple(mesh) for mesh in meshes(2)]
    [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    """
    for replicas in reversed(range(1, workers + 1)):
        for stages in reversed(range(1, workers // replicas + 1)):
            if workers % (replicas * stages) == 0:
                yield Mesh(replicas, stages, workers // (replicas * stages))


class Size(NamedTuple):
    """How large the transformer is."""

    layers: int = LAYERS
    width: int = WIDTH

    def built(self) -> "Words":
        """At A_0."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SEED)
            return Words(*self)


class Words(nn.Module):
    """A small transformer, without dropout: all meshes compute the same."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleDict({str(i): Attention(width, HEADS) for i in range(layers)})
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens of samples × length: the scores of the next ones, samples × length × words."""
        x = self.tokens(tokens) + self.places
        for layer in self.layers.values():
            x = layer(x)
        made: Tensor = self.head(self.norm(x))
        return made


def Loss(scores: Tensor, words: Tensor) -> Tensor:  # noqa: N802 (as on the other pages)
    """Of the next words: the mean of all."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), words)


OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def data() -> tuple[Tensor, Tensor]:
    """Random words and those that follow: no step is quicker for what it learns."""
    draw = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(WORDS, (4 * SAMPLES, LENGTH + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def program(size: Size) -> paceline.Program:
    """What is trained."""
    return paceline.Program(
        model=functools.partial(Words, *size),
        loss=Loss,
        optimizer=OPTIMIZER,
        train=data(),
        global_batch_size=SAMPLES,
        seed=SEED,
    )
