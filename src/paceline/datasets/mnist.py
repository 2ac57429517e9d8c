"""MNIST (LeCun et al. 1998) and Fashion-MNIST (1708.07747): 28 × 28 grey images of 10 classes in IDX files."""

import functools
from pathlib import Path

from torch import Tensor

from paceline.datasets.files import find_files, read_idx
from paceline.datasets.models import class_labels, classifier, cnn, normalised
from paceline.program import Program

_SIDE = 28
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def mnist(*, data: Path | None, seed: int) -> Program:
    """Return handwritten digits under a convolutional network of 21,840 parameters; SGD, learning rate 0.01, batch 32.

    Args:
        data: folder of the four IDX files, or one that contains torchvision's ``MNIST/raw``.
        seed: seed of A_0 and the data order.

    Raises:
        InputError: a file is absent or damaged.
    """
    return _program("mnist", data, seed, "MNIST/raw", mean=0.1307, std=0.3081)


def fashion_mnist(*, data: Path | None, seed: int) -> Program:
    """Return pictures of clothes, otherwise as :func:`mnist`; torchvision's folder is ``FashionMNIST/raw``."""
    return _program("fashion-mnist", data, seed, "FashionMNIST/raw", mean=0.2860, std=0.3530)


def _program(name: str, data: Path | None, seed: int, folder: str, *, mean: float, std: float) -> Program:
    files = find_files(name, data, _FILES, (folder, "."))
    pairs: list[tuple[Tensor, Tensor]] = []
    for images, labels in (files[:2], files[2:]):
        pixels = read_idx(images, (_SIDE, _SIDE))
        targets = class_labels(labels, read_idx(labels, ()), len(pixels))
        pairs.append((normalised(pixels[:, None], [mean], [std]), targets))
    return classifier(name, functools.partial(cnn, 1, _SIDE), *pairs, seed=seed, lr=0.01)
