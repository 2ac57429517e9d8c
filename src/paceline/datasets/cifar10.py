"""CIFAR-10 (Krizhevsky 2009): 32 × 32 colour images of 10 classes in pickled batches."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import InputError
from paceline.datasets.files import ByteArray, find_files, read_pickle
from paceline.datasets.models import class_labels, cnn, normalised
from paceline.program import Program

_SIDE = 32
_BYTES = 3 * _SIDE * _SIDE
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_FOLDER = "cifar-10-batches-py"
_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def cifar10(*, data: Path | None, seed: int) -> Program:
    """Colour photographs under the network of :func:`paceline.datasets.mnist.mnist`, here of 31,340 parameters.

    SGD, learning rate 0.01, batch 32.

    Args:
        data: the folder with ``cifar-10-batches-py``, or that folder.
        seed: of A_0 and the data order.

    Raises:
        InputError: where a file is absent or damaged, or asks for more than plain data.
    """
    *batches, test = find_files("cifar10", data, _FILES, (_FOLDER, "."))
    return Program(
        model=functools.partial(cnn, 3, _SIDE),
        loss=torch.nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        train=_pair(batches),
        test=_pair([test]),
        batch_size=32,
        seed=seed,
        name="cifar10",
    )


def _pair(paths: list[Path]) -> tuple[Tensor, Tensor]:
    pixels, labels = zip(*(_batch(path) for path in paths), strict=True)
    images = np.concatenate(pixels).reshape(-1, 3, _SIDE, _SIDE)
    return normalised(images, _MEAN, _STD), torch.cat(labels)


def _batch(path: Path) -> tuple[NDArray[np.uint8], Tensor]:
    """[n, 3072] bytes, channel first, and n labels."""
    content = read_pickle(path)
    if not isinstance(content, dict) or not {b"data", b"labels"} <= content.keys():
        raise InputError(f"{path} is no dict with b'data' and b'labels'; put the original file there")
    pixels = _pixels(path, content[b"data"])
    return pixels, class_labels(path, _integers(path, content[b"labels"]), len(pixels))


def _pixels(path: Path, value: Any) -> NDArray[np.uint8]:
    pixels = value.value if isinstance(value, ByteArray) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != _BYTES or len(pixels) == 0:
        what = type(value).__name__ if pixels is None else f"an array of shape {pixels.shape}"
        raise InputError(f"{path} holds as data {what}, not bytes of shape [n, {_BYTES}]; put the original file there")
    return pixels


def _integers(path: Path, value: Any) -> NDArray[np.int64]:
    if not isinstance(value, list) or not all(type(label) is int and label.bit_length() < 64 for label in value):
        raise InputError(f"{path} holds labels that are no list of whole numbers; put the original file there")
    return np.array(value, np.int64)
