"""CIFAR-10 (Krizhevsky 2009): 32 × 32 colour images of 10 classes in pickled batches."""

import functools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.datasets.files import ByteArray, damaged, find_files, read_pickle
from paceline.datasets.models import class_labels, classifier, cnn, normalised
from paceline.program import Program

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_FOLDER = "cifar-10-batches-py"
_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def cifar10(*, data: Path | None, seed: int) -> Program:
    """Return colour photographs under the network of :func:`paceline.datasets.mnist.mnist`, with 31,340 parameters.

    SGD, learning rate 0.01, batch 32.

    Args:
        data: folder that contains ``cifar-10-batches-py``, or that folder.
        seed: seed of A_0 and the data order.

    Raises:
        InputError: a file is absent or damaged, or asks for more than plain data.
    """
    *batches, test = find_files("cifar10", data, _FILES, (_FOLDER, "."))
    model = functools.partial(cnn, 3, _SIDE)
    return classifier("cifar10", model, _read(batches), _read([test]), seed=seed, lr=0.01)


def _read(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Return images [n, 3, 32, 32] in float32 and labels [n] of all batch files together."""
    images: list[NDArray[np.uint8]] = []
    targets: list[Tensor] = []
    for path in paths:
        content = read_pickle(path)
        if not isinstance(content, dict) or not {b"data", b"labels"} <= content.keys():
            raise damaged(path, "is no dict with b'data' and b'labels'")
        data, labels = content[b"data"], content[b"labels"]
        pixels = data.value if isinstance(data, ByteArray) else None
        if pixels is None or pixels.ndim != 2 or pixels.shape[1] != _BYTES or len(pixels) == 0:
            kind = type(data).__name__ if pixels is None else f"an array of shape {pixels.shape}"
            raise damaged(path, f"holds as data {kind}, not bytes of shape [n, {_BYTES}]")
        # Not isinstance: True is an int, too.
        if not isinstance(labels, list) or not all(type(label) is int and label.bit_length() < 64 for label in labels):
            raise damaged(path, "holds labels that are no list of whole numbers")
        images.append(pixels)
        targets.append(class_labels(path, np.array(labels, np.int64), len(pixels)))
    # Channels come first in the file: 1,024 red bytes, then green, then blue.
    return normalised(np.concatenate(images).reshape(-1, 3, _SIDE, _SIDE), _MEAN, _STD), torch.cat(targets)
