"""Halo exchange: what a shard gets of others, forward and backward, and what is refused."""

import pytest
import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.replica.tensor.halo import Halo, SlidingWindow, halo_reach
from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.threads import together

LINE = Shard(-1, (1, 4, 3))
REACH = halo_reach(LINE, 8, SlidingWindow(5, before=2))


def halo(shards: TPCollectives, fill: float = 0.0) -> Halo:
    assert REACH is not None
    return Halo(shards, "x", REACH, (0, 0, 1, 0), fill=fill)


def test_a_shard_gets_what_its_windows_see_even_past_its_neighbour() -> None:
    x = torch.arange(8.0).view(1, 8)
    made, calls = together(3, lambda shards: halo(shards, -1.0)(LINE.take(x, shards.rank)))
    none = -1.0
    assert made[0].tolist() == [[none] * 5, [none, none, 0, 1, 2]]
    assert made[1].tolist() == [[none] * 8, [none, 0, 1, 2, 3, 4, 5, 6]]
    assert made[2].tolist() == [[none] * 7, [3, 4, 5, 6, 7, none, none]]
    assert calls == {"all_gather": 1}


def test_gradients_go_back_to_where_the_elements_came_from() -> None:
    def work(shards: TPCollectives) -> Tensor:
        part = torch.zeros(2, LINE.sizes[shards.rank], dtype=torch.float64, requires_grad=True)
        made = halo(shards)(part)
        (found,) = torch.autograd.grad((made * 10.0**shards.rank).sum(), part)
        return found

    made, calls = together(3, work)
    # Shard 0 sees the first three elements, shard 1 the first seven, shard 2 the last five.
    assert LINE.concat(made).tolist() == [[11, 11, 11, 110, 110, 110, 110, 100]] * 2
    assert calls == {"all_gather": 1, "reduce_scatter": 1}


def test_another_length_is_refused() -> None:
    with pytest.raises(InputError, match="x has 2 elements along dim -1 on shard 0, and was planned for 1"):
        together(3, lambda shards: halo(shards)(torch.zeros(1, LINE.sizes[shards.rank] + 1)))
