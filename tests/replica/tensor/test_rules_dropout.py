"""Dropout: each shard drops what one process drops, whatever its part and the order of its dims in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.tensor.base import GraphEmitter
from paceline.replica.tensor.placements import PARTIAL, Shard, even_sizes
from paceline.replica.tensor.rules.attention import ShardedAttention
from paceline.replica.tensor.rules.dropout import drop_part, dropout
from tests.replica.tensor.cases import SHARDS, Case, every_way, looked_at, possible
from tests.replica.tensor.threads import together


def of_none(x: Tensor) -> Tensor:
    return F.dropout(x, 0.0)


def of_all(x: Tensor) -> Tensor:
    return F.dropout(x, 1.0)


CASES = (
    Case("none", dropout, of_none, [(5, 6, 7)]),
    Case("all", dropout, of_all, [(5, 6, 7)]),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_dropped_as_the_whole(k: int, outer: int, dim: int, transposed: bool) -> None:
    whole = numbers(10, 10, 10)
    whole = whole.transpose(0, 1) if transposed else whole
    split, parts, states = Shard(dim, even_sizes(10 // outer, k), outer), [], []
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = F.dropout(whole, 0.3)
        after = torch.get_rng_state()
        for shard in range(k):
            part = split.take(whole, shard)
            part = part.transpose(0, 1).contiguous().transpose(0, 1) if transposed else part.contiguous()
            torch.manual_seed(3)
            parts.append(drop_part(part, 0.3, split, shard))
            states.append(torch.get_rng_state())
    assert torch.equal(split.concat(parts), expected)
    assert all(torch.equal(state, after) for state in states)
    assert 0 < int((expected == 0).sum()) < expected.numel()


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.4)


def test_each_part_is_written_with_its_split() -> None:
    asked = next(c for c in looked_at(Dropped(), numbers(5, 6), 2).calls.values() if "dropout" in str(c.target))
    strategies = possible(asked)
    assert PARTIAL in {strategy.outputs[0] for strategy in strategies}
    for strategy in strategies:
        assert (strategy.emit is not None) == isinstance(strategy.outputs[0], Shard), strategy


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("k", [2, 3])
def test_attention_drops_the_weights_of_one_process(k: int, causal: bool, masked: bool) -> None:
    q, keys, v = numbers(5, 6, 4, 8), numbers(5, 3, 4, 8), numbers(5, 3, 4, 8) * 2
    mask = numbers(4, 4) > 0 if masked and not causal else None
    if mask is not None:
        mask[1] = False  # one that may look at nothing
    heads, groups = Shard(-3, tuple(2 * share for share in even_sizes(3, k))), Shard(-3, even_sizes(3, k))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = F.scaled_dot_product_attention(q, keys, v, mask, 0.4, causal, scale=0.3, enable_gqa=True)

        def part(shard: int) -> Tensor:
            emitter = _writer(k, shard)
            torch.manual_seed(3)
            given = (split.take(t, shard) for t, split in ((q, heads), (keys, groups), (v, groups)))
            made: Tensor = ShardedAttention(heads, emitter.shards.rank, 0.4, causal=causal, scale=0.3, grouped=True)(
                *given, mask
            )
            return made

        found = heads.concat([part(shard) for shard in range(k)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # the same products in the same order, or nearly


def _writer(k: int, shard: int) -> GraphEmitter:
    writers, _ = together(k, lambda shards: GraphEmitter(shards, torch.fx.Graph(), nn.Module(), lambda node: node))
    return writers[shard]
