"""Where a worker's part of A lies in the whole: read there and written there, by name."""

import pytest
import torch
from torch import nn

from paceline.core.mesh import Coordinate, Mesh
from paceline.engine.spmd.shard_views import ShardViews, StageSharding, owned_names
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Shard, shard_layout
from paceline.replica.tensor.placements import Placement as Lies


class Model(nn.Module):
    """A weight of three blocks, as queries, keys and values have; one divided in rows; two that are not divided."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Parameter(torch.zeros(4, 9))
        self.rows = nn.Parameter(torch.zeros(5, 2))
        self.whole = nn.Parameter(torch.zeros(3))
        self.owned = nn.Parameter(torch.zeros(2))


LIES: dict[str, Lies] = {"blocks": Shard(-1, (2, 1), blocks=3), "rows": Shard(-2, (2, 3)), "owned": OnRank(1)}
LIES["whole"] = PARTIAL_GRAD


def numbered(layout: FlatLayout) -> FlatState:
    state = layout.new()
    state.parameters[0].copy_(torch.arange(state.parameters[0].numel(), dtype=torch.float32))
    return state


@pytest.mark.parametrize("shard", [0, 1])
def test_what_is_taken_is_what_the_layouts_say(shard: int) -> None:
    whole = numbered(FlatLayout.of(Model()))
    part = shard_layout(whole.layout, LIES, shard).new()
    ShardViews(part, whole, LIES, shard).take()
    tensors = dict(whole.named())
    for name, mine in part.named():
        how = LIES[name]
        assert torch.equal(mine, how.take(tensors[name], shard) if isinstance(how, Shard) else tensors[name])


def test_what_all_write_is_the_whole_and_each_tensor_is_written_once() -> None:
    expected = numbered(FlatLayout.of(Model()))
    found = expected.layout.new()
    found.parameters[0].fill_(-1.0)
    parts = [shard_layout(expected.layout, LIES, shard) for shard in (0, 1)]
    mesh, written = Mesh(1, (2,)), list[str]()
    for shard, layout in enumerate(parts):
        part = layout.new()
        ShardViews(part, expected, LIES, shard).take()
        names = owned_names([StageSharding(LIES, parts)], mesh, mesh.coordinate(shard))
        ShardViews(part, found, LIES, shard, names).put()
        written += names
    assert torch.equal(found.parameters[0], expected.parameters[0])
    assert sorted(written) == ["blocks", "blocks", "owned", "rows", "rows", "whole"]


def test_of_what_two_stages_have_the_first_one_answers_for() -> None:
    layout = FlatLayout.of(Model())
    stages = [StageSharding({}, [layout.part({"rows", "whole"})]), StageSharding({}, [layout.part({"whole", "owned"})])]
    mesh = Mesh(1, (1, 1))
    assert owned_names(stages, mesh, Coordinate(0, 0)) == {"rows", "whole"}
    assert owned_names(stages, mesh, Coordinate(0, 1)) == {"owned"}


def test_of_those_that_take_turns_at_a_stage_the_first_one_answers() -> None:
    layout = FlatLayout.of(Model())
    stages, mesh = [StageSharding({}, [layout], copies=2)], Mesh(1, (2,), (2,))
    assert owned_names(stages, mesh, Coordinate(0, 0, 0)) == set(layout.parameter_names)
    assert owned_names(stages, mesh, Coordinate(0, 0, 1)) == set()
