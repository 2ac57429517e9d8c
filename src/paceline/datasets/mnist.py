"""MNIST (LeCun et al. 1998) and Fashion-MNIST (1708.07747): 28 × 28 grey images of 10 classes in IDX files."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from paceline.datasets.files import find_files, read_idx
from paceline.datasets.models import class_labels, cnn, normalised
from paceline.program import Program

_SIDE = 28
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def mnist(*, data: Path | None, seed: int) -> Program:
    """Handwritten digits under a small convolutional network of 21,840 parameters; SGD, learning rate 0.01, batch 32.

    Args:
        data: the folder with the four IDX files, or with torchvision's ``MNIST/raw``.
        seed: of A_0 and the data order.

    Raises:
        InputError: where a file is absent or damaged.
    """
    return _program("mnist", data, seed, "MNIST/raw", mean=0.1307, std=0.3081)


def fashion_mnist(*, data: Path | None, seed: int) -> Program:
    """Pictures of clothes, otherwise as :func:`mnist`; torchvision's folder is ``FashionMNIST/raw``."""
    return _program("fashion-mnist", data, seed, "FashionMNIST/raw", mean=0.2860, std=0.3530)


def _program(name: str, data: Path | None, seed: int, folder: str, *, mean: float, std: float) -> Program:
    images, labels, test_images, test_labels = find_files(name, data, _FILES, (folder, "."))
    return Program(
        model=functools.partial(cnn, 1, _SIDE),
        loss=torch.nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        train=_pair(images, labels, mean, std),
        test=_pair(test_images, test_labels, mean, std),
        batch_size=32,
        seed=seed,
        name=name,
    )


def _pair(images: Path, labels: Path, mean: float, std: float) -> tuple[Tensor, Tensor]:
    pixels = read_idx(images, (_SIDE, _SIDE))
    targets = class_labels(labels, read_idx(labels, ()), len(pixels))
    return normalised(pixels[:, None], [mean], [std]), targets
