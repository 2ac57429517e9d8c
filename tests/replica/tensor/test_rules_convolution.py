"""Convolutions, their transposes and pooling, each way × k in 2..4."""

from functools import partial

import pytest
import torch.nn.functional as F

from paceline.replica.tensor.rules.convolution import Convolution, Pooling, Transposed
from tests.replica.tensor.cases import Case, every_way

BOTH = ("filters", "channels", "samples")

CASES = (
    Case("1d", Convolution, partial(F.conv1d, padding=1), [(5, 7, 8)], [(9, 7, 3), (9,)], ways=BOTH),
    Case("2d", Convolution, partial(F.conv2d, stride=2), [(5, 6, 7, 8)], [(10, 6, 3, 3), (10,)], ways=BOTH),
    Case("3d", Convolution, F.conv3d, [(5, 4, 3, 7, 6)], [(6, 4, 2, 2, 2)], ways=BOTH),
    Case("same", Convolution, partial(F.conv2d, padding="same"), [(5, 6, 7, 8)], [(4, 6, 3, 3), (4,)], ways=BOTH),
    Case(
        "groups", Convolution, partial(F.conv2d, groups=5), [(6, 10, 5, 4)], [(15, 2, 3, 3), (15,)], ways=("groups",)
    ),
    Case(
        "depthwise", Convolution, partial(F.conv2d, groups=7), [(5, 7, 4, 4)], [(14, 1, 3, 3), (14,)], ways=("groups",)
    ),
    Case("transposed 1d", Transposed, F.conv_transpose1d, [(5, 7, 8)], [(7, 9, 3), (9,)], ways=BOTH),
    Case(
        "transposed 2d", Transposed, partial(F.conv_transpose2d, stride=2), [(5, 6, 4, 3)], [(6, 7, 3, 3)], ways=BOTH
    ),
    Case("transposed 3d", Transposed, F.conv_transpose3d, [(5, 4, 3, 3, 2)], [(4, 5, 2, 2, 2), (5,)], ways=BOTH),
    Case(
        "transposed, groups", Transposed, partial(F.conv_transpose2d, groups=5),
        [(6, 10, 4, 3)], [(10, 2, 3, 3), (10,)], ways=("groups", "samples"),
    ),
    Case("max", Pooling, partial(F.max_pool2d, kernel_size=2), [(5, 6, 7, 8)]),
    Case("average", Pooling, partial(F.avg_pool1d, kernel_size=3, stride=1, padding=1), [(5, 6, 8)]),
    Case("adaptive", Pooling, partial(F.adaptive_avg_pool2d, output_size=1), [(5, 6, 7, 8)]),
    Case("upsampled", Pooling, partial(F.interpolate, scale_factor=2.0), [(5, 6, 7, 8)]),
    Case(
        "bilinear", Pooling, partial(F.interpolate, size=(6, 6), mode="bilinear", align_corners=False), [(5, 4, 3, 7)]
    ),
    Case("padded", Pooling, partial(F.pad, pad=(1, 2)), [(5, 6, 7)]),
    Case("padded around", Pooling, partial(F.pad, pad=(1, 2, 1, 1), mode="reflect"), [(5, 6, 7, 8)]),
    Case("shuffled", Pooling, partial(F.pixel_shuffle, upscale_factor=2), [(5, 8, 3, 3)]),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case) -> None:
    every_way(case)
