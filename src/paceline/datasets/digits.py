"""The digits that come with scikit-learn: 1,797 handwritten ones of 8 × 8 pixels (UCI, Alpaydin and Kaynak 1998)."""

import functools
from pathlib import Path

import torch

from paceline.datasets.files import no_files
from paceline.datasets.models import classifier, mlp
from paceline.program import Program
from paceline.run import require_package

_TRAIN = 1437  # 80 % of 1,797
_SPLIT_SEED = 0
_SCALE = 4.0


def digits(*, data: Path | None, seed: int) -> Program:
    """Return the embedded default: a 64-64-10 perceptron; SGD, learning rate 0.2, batch 32.

    It passes 95 % in some 100 updates. Pixels are scaled to [0, 1], centred on the training set's mean image and
    multiplied by 4, which makes their spread about 1. Uncentred, the direction of the mean image is by far the
    steepest, and bounds the learning rate at which asynchronous training is stable.

    Args:
        data: must be None; no files are read.
        seed: seed of A_0 and the data order; the split stays the same.

    Raises:
        InputError: ``data`` is given, or scikit-learn is not installed.
    """
    no_files("digits", data)
    require_package("sklearn", "digits", extra="datasets")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    images, targets = torch.from_numpy(pixels)[order].float() / 16, torch.from_numpy(labels)[order].long()
    images = (images - images[:_TRAIN].mean(0)) * _SCALE
    train, test = (images[:_TRAIN], targets[:_TRAIN]), (images[_TRAIN:], targets[_TRAIN:])
    return classifier(
        "digits", functools.partial(mlp, 64, 64, 10, activation=torch.nn.Tanh), train, test, seed=seed, lr=0.2
    )
