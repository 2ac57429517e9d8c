"""Random classification problems, as in the Smooth Switch paper (arXiv 2407.00101, section 6)."""

import functools
from pathlib import Path

import torch

from paceline.datasets.files import no_files
from paceline.datasets.models import classifier, mlp
from paceline.program import Program

FEATURES, CLASSES = 20, 10


def synthetic(*, data: Path | None, seed: int, samples: int = 10_000, clusters: int = 2) -> Program:
    """Return 20 features and 10 classes, split 80:20, under a 20-64-10 perceptron; SGD, learning rate 0.01, batch 32.

    The paper does not say how it drew its samples. Here each class is a few clusters; their centres are drawn from the
    standard normal distribution in each feature, and samples from one around their cluster's centre.

    Args:
        data: must be None; no files are read.
        seed: seed of the samples, of A_0 and of the data order. ``seeded`` changes the last two: the samples stay.
        samples: number of samples, training and test set together; at least 5.
        clusters: number of clusters of each class; with one, a linear model would do.

    Raises:
        InputError: ``data`` is given.
    """
    no_files("synthetic", data)
    generator = torch.Generator().manual_seed(seed % 2**63)  # Program refuses a seed out of range
    centres = torch.randn(CLASSES * clusters, FEATURES, generator=generator)
    cluster = torch.randint(len(centres), (samples,), generator=generator)
    inputs, targets = centres[cluster] + torch.randn(samples, FEATURES, generator=generator), cluster % CLASSES
    split = samples * 4 // 5
    train, test = (inputs[:split], targets[:split]), (inputs[split:], targets[split:])
    return classifier("synthetic", functools.partial(mlp, FEATURES, 64, CLASSES), train, test, seed=seed, lr=0.01)
