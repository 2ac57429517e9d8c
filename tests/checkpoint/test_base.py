"""Ranges of a flat vector are cut into rectangles that cover them exactly once."""

import itertools
from math import prod

import pytest
import torch

from paceline.checkpoint.base import TensorChunk, chunks_of_range
from paceline.checkpoint.reader import ChunksInMemory
from paceline.core.errors import PacelineError


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (1, 5, 1), (3, 1, 2, 2)])
def test_every_range_is_covered_once_in_its_place(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape))
    for start, stop in itertools.combinations(range(len(whole) + 1), 2):
        target = torch.full(shape, -1)
        for chunk in chunks_of_range("w", shape, start, whole[start:stop]):
            window = target[tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.tensor.shape, strict=True))]
            assert torch.all(window == -1)
            window.copy_(chunk.tensor)
            assert chunk.shape == shape
        expected = torch.full((len(whole),), -1)
        expected[start:stop] = whole[start:stop]
        assert torch.equal(target.reshape(-1), expected)


def test_a_chunk_is_a_view_of_the_vector() -> None:
    vector = torch.zeros(4)
    for chunk in chunks_of_range("w", (3, 2), 1, vector):
        chunk.tensor.fill_(1.0)
    assert torch.equal(vector, torch.ones(4))


def test_keys_name_the_offset() -> None:
    assert TensorChunk("a.b", (4, 3), (2, 0), torch.zeros(2, 3)).key == "a.b@2,0"
    assert TensorChunk.whole("step", torch.tensor(1.0)).key == "step@"


def test_chunks_in_memory_are_read_in_another_split_and_none_is_made_up() -> None:
    whole = torch.arange(12.0).view(3, 4)
    left = [TensorChunk("w", (3, 4), (0, at), whole[:, at : at + 2].clone()) for at in (0, 2)]
    rows = [TensorChunk("w", (3, 4), (row, 0), torch.full((1, 4), -1.0)) for row in range(3)]
    source = ChunksInMemory(left)
    assert source.info("w") == ((3, 4), torch.float32)
    source.read_into(rows)
    assert torch.equal(torch.cat([row.tensor for row in rows]), whole)
    with pytest.raises(PacelineError, match="2 elements of w"):
        ChunksInMemory(left[:1]).read_into(rows[:1])
    with pytest.raises(PacelineError, match="12 elements of b"):
        source.read_into([TensorChunk.whole("b", whole)])
