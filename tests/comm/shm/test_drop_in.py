"""What is written against torch.distributed trains the same on ``shm`` as on Gloo.

Two summands have one sum, so with two ranks, or on axes of two, all is equal in every bit. More of them Gloo adds in an
order of its own, and ``shm`` in that of the ranks.
"""

from pathlib import Path
from typing import Any

import pytest
from shm_ranks import Ranks


def _on_both(ranks: Ranks, size: int, scene: str, **args: Any) -> tuple[list[Any], list[Any]]:
    return ranks(size, f"drop_in_scenes:{scene}", **args), ranks(
        size, f"drop_in_scenes:{scene}", backend="gloo", **args
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"unused": True},
        {"accumulate": 3},
        {"gradient_as_bucket_view": True, "accumulate": 2},
    ],
    ids=str,
)
def test_data_parallel(ranks: Ranks, options: dict[str, Any]) -> None:
    ours, gloo = _on_both(ranks, 2, "data_parallel", **options)
    assert ours == gloo
    assert {**ours[0], "losses": 0} == {**ours[1], "losses": 0}


@pytest.mark.parametrize("scene", ["uneven_inputs", "sharded_optimizer", "sparse_gradients", "redistributed"])
def test_two_ranks(ranks: Ranks, scene: str) -> None:
    ours, gloo = _on_both(ranks, 2, scene)
    assert ours == gloo


@pytest.mark.parametrize(
    "options", [{"mesh": [2]}, {"mesh": [2], "reshard": False}, {"mesh": [2], "half": True}], ids=str
)
def test_fully_sharded(ranks: Ranks, options: dict[str, Any]) -> None:
    ours, gloo = _on_both(ranks, 2, "fully_sharded", **options)
    assert ours == gloo


def test_tensor_parallel(ranks: Ranks) -> None:
    ours, gloo = _on_both(ranks, 2, "tensor_parallel", mesh=[2])
    assert ours == gloo


@pytest.mark.parametrize(
    ("schedule", "stages_each"),
    [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2)],
)
def test_pipelines(ranks: Ranks, schedule: str, stages_each: int) -> None:
    ours, gloo = _on_both(ranks, 2, "pipeline", schedule=schedule, stages_each=stages_each)
    assert ours == gloo
    assert len(ours[1]["losses"]) == 16


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ours = ranks(2, "drop_in_scenes:checkpointed", folder=str(tmp_path / "shm"))
    gloo = ranks(2, "drop_in_scenes:checkpointed", folder=str(tmp_path / "gloo"), backend="gloo")
    assert ours == gloo
    assert ours[0]["loaded"] == ours[0]["saved"]


def test_a_checkpoint_that_one_rank_reads(ranks: Ranks, tmp_path: Path) -> None:
    for each in ranks(2, "drop_in_scenes:read_by_one", folder=str(tmp_path)):
        assert each["loaded"] == each["saved"]


@pytest.mark.parametrize("scene", ["fully_sharded", "tensor_parallel"])
def test_meshes_of_two_by_two(ranks: Ranks, scene: str) -> None:
    ours, gloo = _on_both(ranks, 4, scene, mesh=[2, 2])
    assert ours == gloo


def test_subgroups_of_a_mesh(ranks: Ranks) -> None:
    ours, gloo = _on_both(ranks, 4, "in_subgroups")
    assert ours == gloo


@pytest.mark.parametrize(
    ("scene", "args"), [("data_parallel", {}), ("fully_sharded", {"mesh": [4]}), ("redistributed", {})]
)
def test_four_ranks_but_for_the_order_of_sums(ranks: Ranks, scene: str, args: dict[str, Any]) -> None:
    # Four summands of size 1 in another order differ by 2^-52 at most, which four steps of training carry on; and what
    # Adam divides by is no smaller than 1e-8.
    ours, gloo = _on_both(ranks, 4, "in_double", program=scene, **args)
    assert [_flat(one) for one in ours] == [pytest.approx(_flat(other), rel=1e-12, abs=1e-13) for other in gloo]


def _flat(value: Any) -> list[float]:
    """All numbers in it, in their order."""
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in _flat(value[name])]
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]
