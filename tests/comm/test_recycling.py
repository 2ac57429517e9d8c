"""Memory of large vectors is used again once nothing refers to it, and not before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import recycling
from paceline.comm.recycling import LEAST_BYTES, RecyclingAllocator

ELEMENTS = LEAST_BYTES // 4

HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda vector: vector,
    "a view": lambda vector: vector[5:7].view(2, 1),
    "an array": lambda vector: vector.numpy(),
    "a part of an array of bytes": lambda vector: vector.view(torch.uint8).numpy()[3:],
    "a buffer": lambda vector: vector.view(torch.uint8).numpy().data,
    "a parameter": lambda vector: torch.nn.Parameter(vector.detach()[:3]),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_referred_to_is_not_used_again(holder: str) -> None:
    allocator = RecyclingAllocator()
    first = allocator.empty(ELEMENTS, torch.float32).fill_(1.0)
    address, held = first.data_ptr(), HOLDERS[holder](first)
    del first
    second = allocator.empty(ELEMENTS, torch.float32).fill_(2.0)
    assert second.data_ptr() != address
    del held
    assert allocator.empty(ELEMENTS // 2, torch.float64).data_ptr() == address, "the same number of bytes"


def test_sizes_are_kept_apart_and_small_ones_are_the_c_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = RecyclingAllocator()
    address = allocator.empty(ELEMENTS, torch.float32).data_ptr()
    assert allocator.empty(ELEMENTS + 1024, torch.float32).data_ptr() != address
    monkeypatch.setattr(recycling, "LEAST_BYTES", 2 * LEAST_BYTES)
    small = allocator.empty(ELEMENTS, torch.float32)
    assert small.data_ptr() != address
    assert small.numel() == ELEMENTS


def test_vectors_outlive_the_allocator() -> None:
    vector = RecyclingAllocator().empty(ELEMENTS, torch.float32).fill_(3.0)
    assert vector.sum().item() == 3.0 * ELEMENTS
