"""The meshes of so many workers, and the small transformer that each of them trains."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import paceline

SEED = 3
WORDS, LENGTH, WIDTH, HEADS, LAYERS = 512, 64, 128, 4, 4
SAMPLES = 32
"""Of a step, by all replicas together."""


class Mesh(NamedTuple):
    """replicas × stages × shards."""

    replicas: int
    stages: int
    shards: int

    @property
    def strategy(self) -> str:
        """As Paceline writes it; a pipeline goes through 4 micro-batches."""
        micro = " micro_batches=4" if self.stages > 1 else ""
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


class Words(nn.Module):
    """A small transformer, without dropout: all meshes compute the same."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of tokens of samples × length: the scores of the next ones, samples × words × length."""
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).transpose(1, 2)


def program(layers: int = LAYERS, width: int = WIDTH) -> paceline.Program:
    """On random words: no step is quicker for what it learns."""
    draw = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(WORDS, (4 * SAMPLES, LENGTH + 1), generator=draw)
    return paceline.Program(
        model=functools.partial(Words, layers, width),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        train=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        global_batch_size=SAMPLES,
        seed=SEED,
    )
