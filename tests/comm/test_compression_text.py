"""Compressions as text, and how one of your own joins them."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from paceline import Strategy, register
from paceline.compression import Compression, canonical, parse
from paceline.compression.base import Stateless
from paceline.compression.bf16 import Bf16
from paceline.compression.blocks import Blocks
from paceline.compression.fp16 import Fp16
from paceline.compression.powersgd import PowerSgd
from paceline.compression.topk import TopK
from paceline.compression.uncompressed import Uncompressed
from paceline.core.registry import family_of
from paceline.core.text_form import text_of
from tests.comm.compression_values import compressions

CHECK = settings(max_examples=200, deadline=None, derandomize=True)


@CHECK
@given(compressions())
def test_parse_undoes_print(compression: Compression[Any]) -> None:
    text = text_of(compression)
    assert parse(text) == compression
    assert str(compression) == canonical(text) == text == Strategy(compression=text).compression


@pytest.mark.parametrize(
    ("text", "compression"),
    [
        ("none", Uncompressed()),
        ("fp16", Fp16()),
        ("bf16", Bf16()),
        ("powersgd", PowerSgd(rank=4)),
        ("powersgd:rank=1", PowerSgd(rank=1)),
        ("top-k", TopK(ratio=0.01)),
        ("top-k:ratio=1", TopK(ratio=1)),
        ("blocks", Blocks()),
        ("blocks:ratio=0.5,size=64", Blocks(ratio=0.5, size=64)),
    ],
)
def test_canonical_texts(text: str, compression: Compression[Any]) -> None:
    assert parse(text) == compression
    assert text_of(compression) == text


def test_compressions_are_values() -> None:
    compression = parse("powersgd:rank=2")
    assert hash(compression) == hash(parse("powersgd:rank=2"))
    with pytest.raises(FrozenInstanceError):
        compression.rank = 3  # type: ignore[attr-defined]


@pytest.fixture
def registry() -> Iterator[None]:
    """Takes back what a test registers."""
    family = family_of(Compression)
    assert family is not None
    before = dict(family.entries)
    yield
    family.entries.clear()
    family.entries.update(before)


@pytest.mark.usefixtures("registry")
def test_one_file_adds_a_compression() -> None:
    @register("signs")
    @dataclass(frozen=True)
    class Signs(Stateless):
        scale: float = 1.0

        def all_reduce(self, state: None, gradient: torch.Tensor, group: dist.ProcessGroup) -> int:
            return 0

    assert Strategy.parse("replicas=2 compression=signs:scale=0.5").compression == "signs:scale=0.5"
    assert parse("signs") == Signs()
