"""A forward pass is made by the shards together, or by the first alone, whichever is quicker."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.replica.tensor.prepare import GatherText
from paceline.replica.tensor.shard_forward import ShardForward


class Others:
    """The other shards' answers, of which one says how long passes take.

    Args:
        seconds: (shards together, the first alone) of each shard; what this one measures is not used.
    """

    def __init__(self, *seconds: tuple[float, float]) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, text: str, description: str) -> Sequence[str]:
        del description
        if not text:
            return [""] * len(self.seconds)
        together, alone = json.loads(text)
        assert together > 0
        assert alone >= 0
        self.asked += 1
        return [json.dumps(each) for each in self.seconds]


def passes(others: GatherText, rank: int = 0, *, whole: bool = True) -> ShardForward:
    """What says which way it went, and the size of its input."""

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return f"whole {len(x)}"

    captured: Any = SimpleNamespace(flatten=lambda x: [x], rebuild=lambda leaves: leaves[0])
    shard: Any = SimpleNamespace(module=lambda x: [f"divided {len(x)}"])
    return ShardForward(captured, shard, Whole() if whole else None, others, rank)


@pytest.mark.parametrize(
    ("seconds", "rank", "expected"),
    [
        ([(1.0, 1.5), (1.3, 0.0)], 0, "divided 3"),
        ([(1.0, 1.5), (1.3, 0.0)], 1, "divided 3"),
        ([(1.0, 1.5), (1.6, 0.0)], 0, "whole 3"),  # the slowest shard counts
        ([(1.0, 1.5), (1.6, 0.0)], 1, ()),
        ([(1.0, 1.5), (1.4, 0.0)], 0, "whole 3"),  # it saves too little
    ],
)
def test_what_all_shards_agree_on(seconds: list[tuple[float, float]], rank: int, expected: object) -> None:
    others = Others(*seconds)
    forward = passes(others, rank)
    for _ in range(3):
        assert forward(torch.ones(3, 2)) == expected
    assert others.asked == 1


def test_each_size_is_measured_by_itself() -> None:
    others = Others((1.0, 2.0))
    forward = passes(others)
    assert forward(torch.ones(3, 2)) == "divided 3"
    others.seconds = ((2.0, 1.0),)
    assert forward(torch.ones(1, 2)) == "whole 1"
    assert forward(torch.ones(3, 2)) == "divided 3"
    assert others.asked == 2


def test_short_passes_are_timed_again_for_longer() -> None:
    """And then it is the second time that counts."""
    others = Others()
    answers = [((1e-4, 2e-4),), ((3e-4, 2e-4),)]

    def told(text: str, description: str) -> Sequence[str]:
        others.seconds = answers[min(others.asked, 1)]
        return others(text, description)

    forward = passes(told)
    assert forward(torch.ones(3, 2)) == "whole 3"
    assert others.asked == 2


def test_without_a_whole_model_nothing_is_measured() -> None:
    others = Others((2.0, 1.0))
    assert passes(others, whole=False)(torch.ones(1, 2)) == "divided 1"
    assert not others.asked
