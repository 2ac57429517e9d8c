"""Parts of a tensor: which elements they are, and that together they are all of them."""

import pytest
import torch

from paceline.replica.tensor.placements import Shard, even_sizes, memory_order


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_parts_are_the_whole(k: int, outer: int, dim: int) -> None:
    whole = torch.arange(12 * 12 * 12).reshape(12, 12, 12)
    split = Shard(dim, even_sizes(12 // outer, k)[::-1], outer)
    parts = [split.take(whole, shard) for shard in range(k)]
    assert [tuple(part.shape) for part in parts] == [split.local_shape(whole.shape, shard) for shard in range(k)]
    assert torch.equal(split.concat(parts), whole)
    assert split.length == 12
    assert split.share == max(part.numel() for part in parts) / whole.numel()


def test_of_each_block_a_shard_has_its_part() -> None:
    split = Shard(-1, (3, 1), blocks=2)
    first, second = (split.take(torch.arange(8), shard).tolist() for shard in (0, 1))
    assert (first, second) == ([0, 1, 2, 4, 5, 6], [3, 7])
    assert split.offsets == (0, 3)
    assert str(split) == "dim -1 in 2 × 3+1"


def test_where_blocks_are_samples_there_may_be_more_of_them() -> None:
    planned, whole = Shard(-1, (2, 1), blocks=2), torch.arange(15)
    parts = [planned.take(whole, shard) for shard in (0, 1)]
    assert parts[1].tolist() == [2, 5, 8, 11, 14]
    assert torch.equal(planned.concat(parts), whole)


def test_shares_are_even_and_all() -> None:
    for units in range(12):
        for k in (1, 2, 3, 4, 5):
            each = even_sizes(units, k)
            assert sum(each) == units
            assert len(each) == k
            assert max(each) - min(each) <= 1


def test_the_order_in_memory_is_that_of_strides() -> None:
    assert memory_order(torch.empty(2, 1, 3)) == [0, 1, 2]
    assert memory_order(torch.empty(2, 4, 3, 5).permute(0, 2, 3, 1)) == [0, 3, 1, 2]
