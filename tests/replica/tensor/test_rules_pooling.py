"""Pooling, padding and resizing, each strategy × k in 2..4."""

from functools import partial

import pytest
import torch.nn.functional as F

from paceline.replica.tensor.rules.pooling import pooling
from tests.replica.tensor.cases import SHARDS, Case, every_way

SPACE = ("space",)

CASES = (
    Case("max", pooling, partial(F.max_pool2d, kernel_size=2), [(5, 6, 9, 8)], names=SPACE),
    Case("average", pooling, partial(F.avg_pool1d, kernel_size=3, stride=1, padding=1), [(5, 6, 8)], names=SPACE),
    Case("adaptive", pooling, partial(F.adaptive_avg_pool2d, output_size=1), [(5, 6, 7, 8)]),
    Case("upsampled", pooling, partial(F.interpolate, scale_factor=2.0), [(5, 6, 7, 8)]),
    Case(
        "bilinear", pooling, partial(F.interpolate, size=(6, 6), mode="bilinear", align_corners=False), [(5, 4, 3, 7)]
    ),
    Case("padded", pooling, partial(F.pad, pad=(1, 2)), [(5, 6, 7)]),
    Case("padded around", pooling, partial(F.pad, pad=(1, 2, 1, 1), mode="reflect"), [(5, 6, 7, 8)]),
    Case("shuffled", pooling, partial(F.pixel_shuffle, upscale_factor=2), [(5, 8, 3, 3)]),
    Case(
        "max, apart", pooling, partial(F.max_pool1d, kernel_size=3, stride=2, padding=1, dilation=2),
        [(5, 4, 17)], names=SPACE,
    ),
    Case(
        "max, rounded up", pooling, partial(F.max_pool2d, kernel_size=(3, 2), stride=2, padding=1, ceil_mode=True),
        [(5, 4, 8, 6)], names=SPACE,
    ),
    Case("max in depth", pooling, partial(F.max_pool3d, kernel_size=3, stride=1), [(5, 1, 6, 6, 4)], names=SPACE),
    Case(
        "average of what is there", pooling,
        partial(F.avg_pool2d, kernel_size=(5, 3), stride=(1, 2), padding=(2, 1), count_include_pad=False),
        [(5, 4, 6, 7)], names=SPACE,
    ),
    Case(
        "average, rounded up", pooling,
        partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True), [(5, 4, 8, 10)], names=SPACE,
    ),
    Case(
        "average of some rounded up", pooling,
        partial(F.avg_pool1d, kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        [(5, 4, 8)], names=SPACE,
    ),
    Case(
        "sum over a number", pooling, partial(F.avg_pool3d, kernel_size=2, padding=1, divisor_override=3),
        [(5, 1, 8, 6, 6)], names=SPACE,
    ),
    Case("mean of a line", pooling, partial(F.adaptive_avg_pool1d, output_size=1), [(5, 4, 7)]),
    Case("mean of columns", pooling, partial(F.adaptive_avg_pool2d, output_size=(4, 1)), [(5, 4, 8, 7)]),
)  # fmt: skip


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)
