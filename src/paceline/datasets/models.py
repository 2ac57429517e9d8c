"""The small models of the built-in programs."""

import itertools

from torch import nn


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers from the first width to the last, with ``activation`` between them.

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
    """Two convolutions and two linear layers for square images: [n, channels, side, side] -> [n, classes].

    With one channel of 28 × 28 it has 21,840 parameters.

    >>> sum(p.numel() for p in cnn(1, 28).parameters())
    21840
    """
    # Each convolution takes 4 off the side, each pooling halves it.
    left = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20 * left * left, 50),
        nn.ReLU(),
        nn.Linear(50, classes),
    )
