"""A as flat vectors: every tensor has its place, and nothing else has."""

import pytest
import torch
from torch import Tensor, nn

from paceline import InputError
from paceline.replica.flat_state import FlatLayout, read, write
from tests.engine import programs


class Mixed(nn.Module):
    """Two dtypes, a scalar, an empty tensor, a frozen and a tied parameter, and buffers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.twin = nn.Linear(3, 2, bias=False)
        self.twin.weight = self.linear.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("constant", torch.ones(9))


RUNNING = ("mean", "count", "mask")


def test_what_trains_is_laid_out_once_by_dtype() -> None:
    layout = FlatLayout.of(Mixed(), RUNNING)
    names = [[e.name for e in block.entries] for block in (*layout.parameters, *layout.buffers)]
    assert names == [["scale"], ["none", "linear.weight", "linear.bias"], ["mean"], ["count"], ["mask"]]
    assert [b.elements for b in layout.parameters] == [1, 8]
    assert (layout.parameter_bytes, layout.nbytes) == (8 * 4 + 8, 8 * 4 + 8 + 3 * 4 + 8 + 2)


def test_entries_tile_their_vector() -> None:
    for block in FlatLayout.of(Mixed(), RUNNING).parameters:
        edges = [(e.start, e.stop) for e in block.entries]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert all(stop - start == e.shape.numel() for (start, stop), e in zip(edges, block.entries, strict=True))


def test_two_processes_lay_out_alike() -> None:
    assert FlatLayout.of(Mixed(), RUNNING) == FlatLayout.of(Mixed(), reversed(RUNNING))


def test_what_is_read_can_be_written_back() -> None:
    source, target = Mixed(), Mixed()
    with torch.no_grad():
        for tensor in (*source.parameters(), *source.buffers()):
            tensor.copy_(
                torch.rand_like(tensor, dtype=torch.float64) > 0.5 if tensor.dtype is torch.bool else tensor + 1
            )
    state = read(source, FlatLayout.of(source, RUNNING).new())
    write(target, state)
    changed = {*dict(source.named_parameters()), *RUNNING} - {"frozen", "constant"}
    for name, value in (*source.named_parameters(), *source.named_buffers()):
        found = dict(target.named_parameters()) | dict(target.named_buffers())
        assert torch.equal(found[name], value) == (name in changed), name


def test_views_are_the_vectors_own_memory() -> None:
    state = read(Mixed(), FlatLayout.of(Mixed(), RUNNING).new())
    views = dict(state.named())
    views["linear.bias"].fill_(9)
    assert state.parameters[1].tolist()[6:8] == [9, 9]
    state.parameters[0].fill_(5)
    assert views["scale"].item() == 5


def test_a_clone_is_apart_and_a_copy_follows() -> None:
    state = read(Mixed(), FlatLayout.of(Mixed(), RUNNING).new())
    other = state.clone()
    assert other.digest() == state.digest()
    state.buffers[0].add_(1)
    assert other.digest() != state.digest()
    assert other.copy_(state).digest() == state.digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_dtype_has_a_digest(dtype: torch.dtype) -> None:
    model = programs.mlp(dtype)
    state = read(model, FlatLayout.of(model).new())
    assert len(state.digest()) == 64


def test_memory_may_come_from_elsewhere() -> None:
    asked: list[tuple[int, torch.dtype]] = []

    def allocate(elements: int, dtype: torch.dtype) -> Tensor:
        asked.append((elements, dtype))
        return torch.zeros(elements, dtype=dtype)

    FlatLayout.of(Mixed(), RUNNING).new(allocate)
    assert asked == [(1, torch.float64), (8, torch.float32), (3, torch.float32), (1, torch.int64), (2, torch.bool)]


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(InputError, match=r"no parameter to train .* unfreeze a layer"):
        FlatLayout.of(nn.Linear(2, 2).requires_grad_(False))
