"""What is trained: a vector that is hardly used, and the paper's CNN on MNIST."""

import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.datasets import load_program
from paceline.datasets.models import cnn
from paceline.program import Program, as_tensors

IMAGES = (60_000, 1, 28, 28)
"""MNIST's training set."""


SAMPLES = 60_000
"""Of the vector's data: as many as MNIST has, so that a step is no epoch, whose order has to be drawn."""


class Weights(nn.Module):
    """So many parameters, which are hardly used."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(parameters))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.weights.sum()


def identity(output: Tensor, target: Tensor) -> Tensor:
    """The output as its own loss."""
    del target
    return output


def optimizer_of(name: str) -> functools.partial[torch.optim.Optimizer]:
    """``sgd`` or ``adam``, with learning rate 0.01."""
    return functools.partial({"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name], lr=0.01)


def trivial(parameters: int, optimizer: str) -> Program:
    """A vector of so many parameters, for workers that compute nothing, or next to nothing."""
    return Program(
        model=functools.partial(Weights, parameters),
        loss=identity,
        optimizer=optimizer_of(optimizer),
        train=(torch.zeros(SAMPLES, 1), torch.zeros(SAMPLES)),
    )


def images(data: str | None) -> Program:
    """The CNN on MNIST, batch 32, SGD; without a test set, so that nothing is scored beside the training.

    Args:
        data: the folder with MNIST's files; None: noise of its shape.
    """
    if data is not None:
        return replace(load_program("mnist", data=Path(data)), test=None)
    generator = torch.Generator().manual_seed(0)
    return Program(
        model=functools.partial(cnn, 1, IMAGES[-1]),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer_of("sgd"),
        train=(torch.randn(IMAGES, generator=generator), torch.randint(10, IMAGES[:1], generator=generator)),
        batch_size=32,
    )


def pair_of(program: Program) -> tuple[Tensor, Tensor]:
    """The training set's inputs and targets."""
    pair = as_tensors(program.train)
    assert pair is not None, f"{program.name} has no tensors"
    return pair
