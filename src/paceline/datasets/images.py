"""From the bytes of images and labels to the tensors of a program."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import InputError


def normalised(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pixels / 255 - mean) / std in float32, [n, channels, side, side]; mean and std per channel, of values in [0, 1].

    >>> normalised(np.full((1, 1, 1, 1), 255, np.uint8), [0.5], [0.25])
    tensor([[[[2.]]]])
    """
    images = torch.from_numpy(pixels.astype(np.float32))
    channel = (1, -1, 1, 1)
    # In place: a training set of colour images is 0.6 GB.
    return images.div_(255).sub_(torch.tensor(mean).view(channel)).div_(torch.tensor(std).view(channel))


def class_labels(path: Path, labels: NDArray[np.integer], images: int, classes: int = 10) -> Tensor:
    """The labels in int64, [n].

    Raises:
        InputError: where they are not one for each of ``images``, or one is not below ``classes``.
    """
    if len(labels) != images:
        raise InputError(f"{path} holds {len(labels)} labels for {images} images; put the original files there")
    if labels.min() < 0 or labels.max() >= classes:
        worst = labels[(labels < 0) | (labels >= classes)][0]
        raise InputError(f"{path} holds the label {worst}, outside 0 .. {classes - 1}; put the original file there")
    return torch.from_numpy(labels.astype(np.int64))
