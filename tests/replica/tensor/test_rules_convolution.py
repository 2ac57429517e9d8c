"""Convolutions and their transposes, each strategy × k in 2..4."""

from functools import partial

import pytest
import torch.nn.functional as F
from torch import Tensor

from paceline.replica.tensor.rules.convolution import convolution, transposed
from tests.replica.tensor.cases import SHARDS, Case, every_way

SPACE = ("space",)
BOTH = ("filters", "channels", "samples")
ALL = (*BOTH, "space")


def one(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return F.conv2d(x[1], weight, padding=padding)


CASES = (
    Case("1d", convolution, partial(F.conv1d, padding=1), [(5, 7, 8)], [(9, 7, 3), (9,)], names=ALL),
    Case("2d", convolution, partial(F.conv2d, stride=2), [(5, 6, 9, 8)], [(10, 6, 3, 3), (10,)], names=ALL),
    Case("3d", convolution, F.conv3d, [(5, 4, 3, 7, 6)], [(6, 4, 2, 2, 2)], names=ALL),
    Case("same", convolution, partial(F.conv2d, padding="same"), [(5, 6, 7, 8)], [(4, 6, 3, 3), (4,)], names=ALL),
    Case(
        "groups", convolution, partial(F.conv2d, groups=5), [(7, 10, 6, 5)], [(15, 2, 3, 3), (15,)],
        names=("groups", "space"),
    ),
    Case(
        "depthwise", convolution, partial(F.conv2d, groups=7), [(5, 7, 6, 4)], [(14, 1, 3, 3), (14,)],
        names=("groups", "space"),
    ),
    Case("wide", convolution, partial(F.conv1d, padding=3, stride=2), [(5, 2, 19)], [(1, 2, 7), (1,)], names=SPACE),
    Case("apart", convolution, partial(F.conv1d, padding=4, dilation=3), [(5, 2, 9)], [(1, 2, 4)], names=("space",)),
    Case("skips", convolution, partial(F.conv1d, stride=3), [(5, 1, 14)], [(2, 1, 1), (2,)], names=("space",)),
    Case("mostly padding", convolution, partial(F.conv1d, padding=5), [(5, 1, 4)], [(1, 1, 2)], names=("space",)),
    Case(
        "same, even", convolution, partial(F.conv2d, padding="same", dilation=(1, 2)),
        [(3, 1, 6, 5)], [(2, 1, 4, 2)], names=("space",),
    ),
    Case("valid", convolution, partial(F.conv1d, padding="valid"), [(5, 1, 9)], [(1, 1, 5), (1,)], names=("space",)),
    Case(
        "uneven in depth", convolution, partial(F.conv3d, stride=(1, 2, 1), padding=(2, 0, 1)),
        [(3, 1, 5, 6, 4)], [(1, 1, 5, 3, 2)], names=("space",),
    ),
    Case("one sample", convolution, partial(one, padding=1), [(5, 2, 7, 6)], [(1, 2, 3, 3)], names=("space",)),
    Case("transposed 1d", transposed, F.conv_transpose1d, [(5, 7, 8)], [(7, 9, 3), (9,)], names=BOTH),
    Case(
        "transposed 2d", transposed, partial(F.conv_transpose2d, stride=2), [(5, 6, 4, 3)], [(6, 7, 3, 3)], names=BOTH
    ),
    Case("transposed 3d", transposed, F.conv_transpose3d, [(5, 4, 3, 3, 2)], [(4, 5, 2, 2, 2), (5,)], names=BOTH),
    Case(
        "transposed, groups", transposed, partial(F.conv_transpose2d, groups=5),
        [(6, 10, 4, 3)], [(10, 2, 3, 3), (10,)], names=("groups", "samples"),
    ),
)  # fmt: skip


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)
