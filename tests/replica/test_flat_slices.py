"""Slices of A: together they are all of it, and checkpoints have them by the names of the full tensors."""

import functools
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from paceline.checkpoint.reader import ChunksInMemory
from paceline.replica.flat_slices import joined, slices_of
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.optimizer_factory import OptimizerFactory
from paceline.replica.optimizer_state import whole_chunks
from tests.engine import programs

ANYWHERE = functools.partial(SGD, lr=0.1)
AT_BORDERS = functools.partial(Adagrad, lr=0.1)


def mixed() -> nn.Module:
    """Parameters of two dtypes, and running buffers of two others."""
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).double())


def state(model: nn.Module) -> FlatState:
    layout = FlatLayout.of(model, [name for name, _ in model.named_buffers()])
    filled = read(model, layout.new())
    for i, vector in enumerate(filled.vectors):
        vector.copy_(torch.arange(len(vector)) + 100 * i)
    return filled


@pytest.mark.parametrize("make", [ANYWHERE, AT_BORDERS], ids=["anywhere", "at borders"])
@pytest.mark.parametrize("servers", [1, 2, 3, 7, 200])
def test_they_are_all_of_it_once(make: OptimizerFactory, servers: int) -> None:
    whole = state(mixed())
    slices = slices_of(whole.layout, servers, make)
    assert joined(slices, [part.of(whole) for part in slices]).digest() == whole.digest()
    for spans in zip(*(part.spans for part in slices), strict=True):
        assert all(before.stop == after.start for before, after in pairwise(spans))
    arrays = [vector.view(torch.uint8).numpy() for vector in whole.vectors]
    for part in slices:
        cut = [array.tobytes() for array in part.cut_bytes([*arrays, arrays[0]])]
        own = [vector.view(torch.uint8).numpy().tobytes() for vector in part.of(whole).vectors]
        assert cut == own + ([arrays[0].tobytes()] if part.number == 0 else [])


def test_they_are_equal_where_each_element_is_treated_alone() -> None:
    whole = state(programs.wide())
    sizes = [part.layout.parameter_bytes for part in slices_of(whole.layout, 4, ANYWHERE)]
    assert max(sizes) - min(sizes) <= 8


def test_else_they_have_whole_parameters_in_their_shapes() -> None:
    whole = state(mixed())
    names = list[str]()
    for part in slices_of(whole.layout, 3, AT_BORDERS):
        for entry, view in part.of(whole).entries():
            assert torch.equal(view, dict(whole.named())[entry.name])
            names.append(entry.name)
    assert sorted(names) == sorted(whole.layout.names)


@pytest.mark.parametrize("make", [ANYWHERE, AT_BORDERS], ids=["anywhere", "at borders"])
@pytest.mark.parametrize("servers", [1, 2, 5])
def test_a_checkpoint_has_them_in_any_split(make: OptimizerFactory, servers: int) -> None:
    whole = state(mixed())
    chunks = [chunk for part in slices_of(whole.layout, servers, make) for chunk in part.chunks(part.of(whole))]
    read_whole = whole.layout.new()
    ChunksInMemory(chunks).read_into(whole_chunks(read_whole))
    assert read_whole.digest() == whole.digest()
    for part in slices_of(whole.layout, 3, make):
        own = part.layout.new()
        ChunksInMemory(whole_chunks(whole)).read_into(part.chunks(own))
        assert own.digest() == part.of(whole).digest()


def test_an_optimizer_of_a_slice_has_the_groups_of_the_whole() -> None:
    """What falls to no slice of a group leaves that group empty, and the others as they were."""
    whole = state(programs.mlp())
    slices = slices_of(whole.layout, 2, programs.half_decayed)
    parameters = [[nn.Parameter(view) for view in part.of(whole).views.parameters] for part in slices]
    made = [part.optimizer(programs.half_decayed)(own) for part, own in zip(slices, parameters, strict=True)]
    expected = programs.half_decayed(list(programs.mlp().parameters())).param_groups
    assert [[g["weight_decay"] for g in each.param_groups] for each in made] == [
        [group["weight_decay"] for group in expected]
    ] * 2
    assert sum(len(group["params"]) for each in made for group in each.param_groups) == 4


def test_equal_slices_have_one_vector_of_a_dtype_each() -> None:
    whole = state(programs.mlp())
    for part in slices_of(whole.layout, 3, functools.partial(Adam, lr=0.1)):
        own = part.of(whole)
        optimizer = part.optimizer(functools.partial(Adam, lr=0.1))([nn.Parameter(v) for v in own.parameters])
        assert len(optimizer.param_groups[0]["params"]) == 1
