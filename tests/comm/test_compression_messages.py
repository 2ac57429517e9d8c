"""Messages of compressed gradients: what a server reads is the all-reduce of one rank, in as many bytes as said."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline import InputError
from paceline.compression import Compression, parse

TEXTS = [
    "fp16",
    "bf16",
    "top-k:ratio=0.1",
    "top-k:ratio=1",
    "powersgd:rank=1",
    "powersgd:rank=3",
    "blocks",
    "blocks:ratio=0.3,size=7",
]
SHAPES = [(20, 30), (7,), (1,), (16, 4, 5), (2, 2)]
ELEMENTS = sum(map(math.prod, SHAPES))


class OneRank:
    """A group whose sums are what its only rank has."""

    def size(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(outputs: Sequence[Tensor], tensor: Tensor, group: Any) -> None:
        outputs[0].copy_(tensor)

    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_gather", all_gather)


def gradients(dtype: torch.dtype, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ELEMENTS, generator=generator, dtype=dtype) for _ in range(steps)]


def encoded(compression: Compression[Any], state: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What a replica goes on with, and what a server reads of its message."""
    own, read = gradient.clone(), torch.full_like(gradient, 77.0)
    message = compression.encode(state, own)
    assert message.dtype == torch.uint8
    assert len(message) == compression.message_bytes(SHAPES, gradient.dtype)
    compression.decode(SHAPES, message, read)
    return own, read


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", TEXTS)
def test_they_are_the_sum_of_one_rank_step_by_step(text: str, dtype: torch.dtype) -> None:
    compression = parse(text)
    states = [compression.start(SHAPES, dtype) for _ in range(2)]
    # Products of the same factors, of matrices that lie in memory in other ways.
    bound = 32 * torch.finfo(dtype).eps if text.startswith("powersgd") else 0.0
    for gradient in gradients(dtype):
        own, read = encoded(compression, states[0], gradient)
        assert torch.equal(own, read)
        summed = gradient.clone()
        compression.all_reduce(states[1], summed, OneRank())  # type: ignore[arg-type]
        torch.testing.assert_close(read, summed, rtol=bound, atol=bound)
        kept = [compression.kept(state)[0] for state in states]
        if kept[0] is not None and kept[1] is not None:
            torch.testing.assert_close(kept[0], kept[1], rtol=bound, atol=bound)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_left_comes_later(text: str) -> None:
    """Of compressions with feedback: all that was read and what is left are all gradients."""
    compression, dtype = parse(text), torch.float64
    state, read = compression.start(SHAPES, dtype), torch.zeros(ELEMENTS, dtype=dtype)
    for gradient in gradients(dtype):
        read += encoded(compression, state, gradient)[1]
    residual, _ = compression.kept(state)
    if residual is not None:
        # Some sums of numbers near 1, each rounded.
        torch.testing.assert_close(read + residual, sum(gradients(dtype)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_finite_is_not_and_leaves_the_state(text: str, bad: float) -> None:
    compression = parse(text)
    states = [compression.start(SHAPES, torch.float32) for _ in range(2)]
    first, second, _, _ = gradients(torch.float32)
    broken = second.clone()
    broken[3] = bad
    for state in states:
        encoded(compression, state, first)
    assert not encoded(compression, states[0], broken)[1].isfinite().all()
    assert torch.equal(encoded(compression, states[0], second)[1], encoded(compression, states[1], second)[1])


def test_they_are_smaller() -> None:
    dense = 4 * ELEMENTS
    sizes = {text: parse(text).message_bytes(SHAPES, torch.float32) for text in TEXTS}
    assert sizes["fp16"] == dense // 2 + 4
    assert sizes["bf16"] == dense // 2
    assert sizes["top-k:ratio=0.1"] == 8 * round(0.1 * ELEMENTS)
    assert sizes["blocks:ratio=0.3,size=7"] == (8 + 4 * 7) * round(0.3 * -(-ELEMENTS // 7))
    whole = 7 + 1 + 4  # what would not shrink to half
    assert sizes["powersgd:rank=1"] == 4 * (20 + 30 + 16 + 20 + whole)


@pytest.mark.parametrize("text", TEXTS)
def test_of_nothing(text: str) -> None:
    """A server may have no slice of a vector."""
    compression, empty = parse(text), torch.zeros(0)
    message = compression.encode(compression.start([], torch.float32), empty)
    assert len(message) == compression.message_bytes([], torch.float32)
    compression.decode([], message, empty)


def test_one_without_messages_says_so() -> None:
    with pytest.raises(InputError, match="compression=none sums over all ranks, but has no message"):
        parse("none").message_bytes(SHAPES, torch.float32)
