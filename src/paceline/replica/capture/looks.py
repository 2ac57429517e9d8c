"""Batches that are looked at before a model is captured, for sizes that differ besides the number of samples."""

from collections.abc import Sequence
from itertools import islice
from typing import cast

import numpy as np
import torch

from paceline.program import Data, Program, as_tensors, is_source, length
from paceline.replica.base import Batch, as_batch
from paceline.replica.batches import fetcher

# Batches that are looked at besides the first: of a padded text, two of them hardly ever have one length.
LOOKS = 3


def other_batches(program: Program, samples: int) -> Sequence[Batch] | None:
    """Return some batches in which the sizes of a program's inputs may differ.

    Samples of a pair of tensors have one size, and so have those that torch stacks to a batch: there are none to look
    at. Other batches, as of ``collate_fn``, are spread over the whole data set; of a function they are its first ones.

    Args:
        program: holds the data.
        samples: of a batch.

    Returns:
        The batches; None where they can't be had.
    """
    train, whole = program.train, program.model_makes_loss
    if not is_source(train) and "collate_fn" not in program.loader and (as_tensors(train) or samples > 1):
        return ()
    try:
        with torch.random.fork_rng(devices=[]):
            if is_source(train):
                return [as_batch(item, whole=whole) for item in islice(train(0, 1, program.seed), LOOKS + 1)]
            count, fetch = length(cast(Data, train)), fetcher(cast(Data, train), program.loader, whole=whole)
            starts = [max(0, count - samples) * look // (LOOKS - 1) for look in range(LOOKS)]
            rows = [np.arange(start, min(start + samples, count)) for start in starts]
            return [Batch(*fetch(indices), len(indices)) for indices in rows]
    except Exception:  # of the user's code, which is met again, and reported, where the batch is needed
        return None
