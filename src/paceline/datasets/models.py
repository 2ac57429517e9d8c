"""Small models of the built-in programs, how they are trained, and tensors from the bytes of images and labels."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.datasets.files import damaged
from paceline.program import Program


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers from the first width to the last, with ``activation`` between them.

    >>> mlp(20, 64, 10)
    Sequential(
      (0): Linear(in_features=20, out_features=64, bias=True)
      (1): ReLU()
      (2): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int, side: int, classes: int = 10) -> nn.Sequential:
    """Return two convolutions and two linear layers: [n, channels, side, side] -> [n, classes].

    With one channel of 28 × 28 it has 21,840 parameters.

    >>> sum(p.numel() for p in cnn(1, 28).parameters())
    21840
    """
    # Each convolution takes 4 off the side, each pooling halves it.
    left = ((side - 4) // 2 - 4) // 2
    layers: list[nn.Module] = []
    for before, after in ((channels, 10), (10, 20)):
        layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *mlp(20 * left * left, 50, classes))


# Inputs and class labels, [n, ...] and [n].
Samples: TypeAlias = tuple[Tensor, Tensor]


def classifier(
    name: str, model: Callable[[], nn.Module], train: Samples, test: Samples, *, seed: int, lr: float
) -> Program:
    """Return a program that learns classes by cross-entropy: SGD with learning rate ``lr``, batch 32."""
    return Program(
        model,
        torch.nn.functional.cross_entropy,
        functools.partial(torch.optim.SGD, lr=lr),
        train,
        test,
        batch_size=32,
        seed=seed,
        name=name,
    )


def normalised(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels / 255 - mean) / std in float32, [n, channels, side, side]; mean and std per channel.

    >>> normalised(np.full((1, 1, 1, 1), 255, np.uint8), [0.5], [0.25])
    tensor([[[[2.]]]])
    """
    images = torch.from_numpy(pixels.astype(np.float32))
    channel = (1, -1, 1, 1)
    # In place: a training set of colour images is 0.6 GB.
    return images.div_(255).sub_(torch.tensor(mean).view(channel)).div_(torch.tensor(std).view(channel))


def class_labels(path: Path, labels: NDArray[np.integer], images: int, classes: int = 10) -> Tensor:
    """Return the labels in int64, [n].

    Raises:
        InputError: they are not one for each of ``images``, or one is not below ``classes``.
    """
    if len(labels) != images:
        raise InputError(f"{path} holds {len(labels)} labels for {images} images; put the original files there")
    if labels.min() < 0 or labels.max() >= classes:
        worst = labels[(labels < 0) | (labels >= classes)][0]
        raise damaged(path, f"holds the label {worst}, outside 0 .. {classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))
