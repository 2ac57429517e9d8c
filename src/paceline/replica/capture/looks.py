"""Batches that are looked at before a model is captured, for sizes that differ besides the number of samples."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import cast

import numpy as np

from paceline.device import OwnGenerators
from paceline.program import Data, Program, Tree, as_tensors, is_source, length
from paceline.replica.base import Batch
from paceline.replica.batches import BatchSource, fetcher

# Batches that are looked at besides the first: of a padded text, two of them hardly ever have one length.
LOOKS = 3


def other_inputs(program: Program, samples: int, *, with_target: bool = False) -> Sequence[Tree] | None:
    """Return the inputs of some batches in which their sizes may differ.

    Samples of a pair of tensors have one size, and so have those that torch stacks to a batch: there are none to look
    at. Other batches, as of ``collate_fn``, are spread over the whole data set; of a function, or of an
    IterableDataset, they are its first ones.

    Args:
        program: holds the data.
        samples: of a batch.
        with_target: whether an input is (input, target).

    Returns:
        The inputs; None where they can't be had.
    """
    train = program.train
    if not is_source(train) and "collate_fn" not in program.loader and (as_tensors(train) or samples > 1):
        return ()
    try:
        with OwnGenerators(program.seed):
            batches = _batches(program, samples)
    except Exception:  # of the user's code, which is met again, and reported, where the batch is needed
        return None
    return [(batch.input, batch.target) if with_target else batch.input for batch in batches]


def _batches(program: Program, samples: int) -> Sequence[Batch]:
    if is_source(program.train):
        with closing(BatchSource(program.without_workers(), None, replicas=1)) as source:
            return list(islice(source.stream(0), LOOKS + 1))
    train = cast(Data, program.train)
    count, fetch = length(train), fetcher(train, program.loader, whole=program.model_makes_loss)
    starts = [max(0, count - samples) * look // (LOOKS - 1) for look in range(LOOKS)]
    rows = [np.arange(start, min(start + samples, count)) for start in starts]
    return [Batch(*fetch(indices), len(indices)) for indices in rows]
