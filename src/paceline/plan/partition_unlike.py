"""Where to cut a row of layers whose times hang on the part they fall to, so that the slowest part is quick as can be.

::

    f_1(e) = S_1(e) / n_1
    f_k(e) = min over s < e of max(f_{k-1}(s), (S_k(e) - S_k(s)) / n_k)        S_k: sums of what layers take in part k
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InputError
from paceline.core.types import Seconds


def balanced_unlike(seconds: Sequence[Sequence[Seconds]], turns: Sequence[int] = ()) -> tuple[int, ...]:
    """The first layer of each part after the first, each of at least one layer; exact, in time p · layers².

    Args:
        seconds: of each layer, for each of the p parts.
        turns: n_k, how many take turns at each part, which then counts as so many times faster; empty: one at each.

    Raises:
        InputError: fewer layers than parts.

    >>> balanced_unlike([[1, 1, 1, 1], [3, 3, 3, 3]])  # 3 layers at 1, then one at 3
    (3,)
    """
    layers, parts = len(seconds[0]), len(seconds)
    if parts > layers:
        raise InputError(f"{layers} layers can't be cut into {parts} parts; write 1 to {layers} stages.")
    sums = [np.array([0.0, *accumulate(row)]) / n for row, n in zip(seconds, turns or (1,) * parts, strict=True)]
    ends, begun = np.where(np.arange(layers + 1) == 0, np.inf, sums[0]), list[NDArray[np.intp]]()
    for row in sums[1:]:
        slowest = np.maximum(ends[:, None], row[None, :] - row[:, None])
        slowest[np.tril_indices(layers + 1)] = np.inf
        begun.append(slowest.argmin(axis=0))
        ends = slowest.min(axis=0)
    return _back(begun, layers)


def _back(begun: Sequence[NDArray[np.intp]], last: int) -> tuple[int, ...]:
    cuts = list[int]()
    for starts in reversed(begun):
        last = int(starts[last])
        cuts.append(last)
    return tuple(reversed(cuts))
