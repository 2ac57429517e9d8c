"""Sending and receiving on the ``shm`` backend."""

import pytest
from shm_ranks import Ranks

from paceline.comm.shm.region import PIECE_BYTES, PIECES


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_dtype_round_a_ring(ranks: Ranks, size: int) -> None:
    assert ranks(size, "message_scenes:every_dtype") == [[]] * size


def test_larger_than_a_channel(ranks: Ranks) -> None:
    assert ranks(3, "message_scenes:blocking", elements=2 * PIECES * PIECE_BYTES // 8 + 5) == [[]] * 3


def test_tags_out_of_order(ranks: Ranks) -> None:
    assert ranks(2, "message_scenes:tags_out_of_order") == [[]] * 2


def test_many_outstanding_keep_their_order(ranks: Ranks) -> None:
    assert ranks(4, "message_scenes:same_tag_in_order", messages=200) == [[]] * 4


@pytest.mark.parametrize("size", [2, 5])
def test_from_anyone(ranks: Ranks, size: int) -> None:
    assert ranks(size, "message_scenes:from_anyone", messages=50) == [[]] * size


@pytest.mark.parametrize("scene", ["anyone_and_one", "batches", "in_a_subgroup"])
def test_who_gets_what(ranks: Ranks, scene: str) -> None:
    assert ranks(4, f"message_scenes:{scene}") == [[]] * 4
