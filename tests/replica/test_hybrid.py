"""Parts of a pipeline divided each for itself, and what is asked of them by hand."""

import functools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline import InputError, Program, Strategy
from paceline.replica.base import Batch
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.pipeline.prepare import prepare_cut
from paceline.replica.tensor.placements import OnRank, Placement, Shard
from paceline.replica.tensor.prepare import gather_alone
from paceline.shard_rules import ShardRules


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b2 = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b1(x), self.b2(x)], 1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Fork(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def lies(
    rules: Mapping[str, str], counts: Sequence[int] = (2, 2), made: Callable[[], nn.Module] = model
) -> list[Mapping[str, Placement]]:
    """Of two stages, the second of which begins with the third layer."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = Batch(x, torch.arange(8) % 4, 8)
    program = Program(
        model=made,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        train=(batch.input, batch.target),
    )
    module, strategy = program.build(), Strategy.parse("stages=2 cuts=2 shards=2 micro_batches=2")
    cut = prepare_cut(program, strategy, module, batch, lambda choose: choose()).cut
    request = ShardingRequest(program, cut, module, [x[:4]], counts, ShardRules(rules))
    return list(shard_parts(request, {}, gather_alone).placements)


def test_each_part_is_divided_for_itself() -> None:
    first, second = lies({})
    assert {name.partition(".")[0] for name in first} == {"0", "1"}
    assert {name.partition(".")[0] for name in second} == {"2", "4"}
    weights = [how for part in (first, second) for name, how in part.items() if name.endswith("weight")]
    assert len(weights) == 5
    assert all(isinstance(how, Shard) for how in weights)


def test_a_pattern_is_for_the_parts_that_it_fits() -> None:
    first, second = lies({"1.b*": "branch", "4": "whole"})
    assert {first["1.b1.weight"], first["1.b2.weight"]} == {OnRank(0), OnRank(1)}
    assert not isinstance(second["4.weight"], (Shard, OnRank))
    assert isinstance(second["2.weight"], Shard)


def test_a_pattern_that_fits_no_part_is_refused() -> None:
    with pytest.raises(InputError, match=r"unknown module in shard_rules '1\.c\*'.*1\.b1"):
        lies({"1.c*": "branch"})


class Sorted(nn.Module):
    """Uses the weight of an earlier layer in an operator that is never divided."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.layer = weight, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.weight.sort(0).values)


def test_a_weight_that_a_later_stage_can_not_divide_alike_is_named() -> None:
    def shared() -> nn.Module:
        first = nn.Linear(6, 8)
        return nn.Sequential(first, nn.ReLU(), Sorted(first.weight)).double()

    with pytest.raises(InputError, match=r"^0\.weight: a later stage can't divide what it shares .* write shards=1"):
        lies({}, made=shared)


def test_a_stage_of_one_worker_is_left_as_it_is() -> None:
    first, second = lies({"4": "column"}, counts=(1, 2))
    assert first == {}
    assert isinstance(second["4.weight"], Shard)
