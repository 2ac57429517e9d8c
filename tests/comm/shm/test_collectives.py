"""Every collective of the ``shm`` backend against plain torch on the data of all ranks: equal in every bit."""

import pytest
import torch
from shm_ranks import Ranks
from shm_values import COMBINED, MOVED

from paceline.comm.shm.rendezvous import STAGE_BYTES

FEW = (torch.bool, torch.int32, torch.bfloat16, torch.float64)
"""One of each size in bytes."""


def _names(dtypes: tuple[torch.dtype, ...]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_moves_every_dtype_through_small_stages(ranks: Ranks, size: int) -> None:
    dtypes = _names(MOVED if size == 2 else FEW)
    assert ranks(size, "collective_scenes:moves", dtypes=dtypes) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_combines_every_dtype_by_every_operation(ranks: Ranks, size: int) -> None:
    dtypes = _names(COMBINED if size == 2 else FEW)
    assert ranks(size, "collective_scenes:combines", dtypes=dtypes) == [[]] * size


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (2, 4), (4, 2)])
def test_tensors_around_the_stage_and_above(ranks: Ranks, size: int, stages: int) -> None:
    stage = stages * STAGE_BYTES // 4
    elements = [stage - 1, stage, stage + 1] if stages == 1 else [stage + 3]
    assert ranks(size, "collective_scenes:moves", dtypes=["float32"], elements=elements) == [[]] * size
    assert ranks(size, "collective_scenes:combines", dtypes=["float32"], elements=elements) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts(ranks: Ranks, size: int) -> None:
    assert ranks(size, "layout_scenes:layouts") == [[]] * size


@pytest.mark.parametrize("scene", ["complex_numbers", "sparse"])
def test_other_tensors(ranks: Ranks, scene: str) -> None:
    assert ranks(3, f"layout_scenes:{scene}") == [[]] * 3


@pytest.mark.parametrize("scene", ["functional_collectives", "functional_coalesced", "gradients", "objects"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_functional_and_object_collectives(ranks: Ranks, size: int, scene: str) -> None:
    assert ranks(size, f"functional_scenes:{scene}") == [[]] * size


@pytest.mark.parametrize("size", [2, 4, 5])
def test_several_groups_interleaved_in_other_orders(ranks: Ranks, size: int) -> None:
    assert ranks(size, "group_scenes:interleaved", rounds=20) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_many_calls_under_way(ranks: Ranks, size: int) -> None:
    assert ranks(size, "group_scenes:many_under_way", calls=30) == [[]] * size


@pytest.mark.parametrize("size", [2, 4])
def test_two_threads(ranks: Ranks, size: int) -> None:
    assert ranks(size, "group_scenes:two_threads", calls=50) == [[]] * size


@pytest.mark.parametrize("scene", ["completes_by_looking", "futures", "coalesced", "coalesced_lists"])
def test_what_calls_return(ranks: Ranks, scene: str) -> None:
    assert ranks(3, f"group_scenes:{scene}") == [[]] * 3


def test_groups_come_and_go(ranks: Ranks) -> None:
    assert ranks(3, "group_scenes:made_and_destroyed", times=60) == [[]] * 3
