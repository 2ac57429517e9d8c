"""The programs of the benchmark: random data, and the two image sets."""

import functools
from dataclasses import replace
from pathlib import Path

from torch.nn import functional as F

from paceline import Program
from paceline.datasets import load_program
from paceline.datasets.models import mlp
from paceline.datasets.synthetic import CLASSES, FEATURES, synthetic
from paceline.program import as_tensors

RANDOM = "synthetic"


LOSSES = {"cross-entropy": F.cross_entropy, "multi-margin": F.multi_margin_loss}
"""Of the models for random data."""


@functools.lru_cache(maxsize=2)
def program(
    dataset: str,
    folder: Path | None,
    sample: int,
    hidden: int,
    clusters: int,
    layers: int = 1,
    loss: str = "cross-entropy",
    samples: int = 10_000,
    pixels: str = "standard",
) -> Program:
    """A program; random data are drawn by ``sample`` and have a model with ``layers`` layers of ``hidden`` units.

    ``pixels`` of images are ``standard`` (mean 0, deviation 1 in each channel) or ``unit``: from 0 to 1.
    """
    if dataset != RANDOM:
        made = load_program(dataset, data=folder)
        return made if pixels == "standard" else _in_units(made)
    widths = (FEATURES, *(layers * [hidden] if hidden else []), CLASSES)
    made = synthetic(data=None, seed=sample, samples=samples, clusters=clusters)
    return replace(made, model=functools.partial(mlp, *widths), loss=LOSSES[loss])


def _in_units(made: Program) -> Program:
    """With inputs from 0 to 1 in each channel of the training set, which has black and white pixels."""
    train, test = as_tensors(made.train), as_tensors(made.test)
    assert train is not None, f"{made.name} has no tensors"
    assert test is not None, f"{made.name} has no tensors"
    dims = [0, *range(2, train[0].dim())]
    low, high = train[0].amin(dims, keepdim=True), train[0].amax(dims, keepdim=True)
    return replace(
        made, train=((train[0] - low) / (high - low), train[1]), test=((test[0] - low) / (high - low), test[1])
    )
