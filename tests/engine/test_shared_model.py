"""A model that travels to the other ranks of a host, and one that does not."""

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from paceline.comm.shared_memory import SpillAllocator
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.engine.spmd.rank_context import RankContext, build_once_per_host
from paceline.engine.spmd.rank_registry import RankRegistry


class Forgetful(nn.Linear):
    """Leaves its scale behind when it travels."""

    def __init__(self) -> None:
        super().__init__(256, 256)
        self.scale = 2.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "scale": 1.0}


def alone() -> RankContext:
    world = LaunchEnv(0, 1, 1)
    return RankContext(world, RankRegistry(world, None), None, None)


def received(module: nn.Module) -> nn.Module:
    """What a rank has of a model that the first rank of its host has made."""
    with build_once_per_host(lambda _: module, alone()) as found:
        return found


def test_what_travels_is_mapped_and_another_rank_may_write_into_it() -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    module[2].weight.requires_grad_(False)
    found = received(module)
    assert found is not module
    assert torch.equal(found[0].weight, module[0].weight)  # type: ignore[index]
    assert not found[2].weight.requires_grad  # type: ignore[index]
    with torch.no_grad():
        found[0].weight.zero_()  # type: ignore[index]
    assert module[0].weight.count_nonzero()


def test_a_model_that_says_by_itself_what_is_sent_stays_where_it_is() -> None:
    module = Forgetful()
    assert received(module) is module


def test_a_model_that_cannot_be_pickled_stays_where_it_is() -> None:
    module = weight_norm(nn.Linear(256, 256))
    assert received(module) is module


def test_it_is_made_once() -> None:
    made = list[SpillAllocator]()

    def make(spill: SpillAllocator) -> nn.Module:
        made.append(spill)
        return nn.Linear(256, 256)

    with build_once_per_host(make, alone()) as found:
        assert isinstance(found, nn.Linear)
    assert len(made) == 1
