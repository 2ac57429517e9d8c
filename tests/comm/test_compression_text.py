"""Compressions as text, and how one of your own joins them."""

from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from paceline import Strategy, register
from paceline.comm import compression
from paceline.comm.compression import base
from paceline.comm.compression.base import Compression, Shape, carriers, carries
from paceline.compression import Bf16, Fp16, Method, PowerSgd, TopK, Whole, canonical, parse
from paceline.core import registry
from paceline.core.errors import InputError
from paceline.core.text_form import text_of
from tests.comm.compression_values import methods

CHECK = settings(max_examples=200, deadline=None, derandomize=True)


@CHECK
@given(methods())
def test_parse_undoes_print(method: Method) -> None:
    text = text_of(method)
    assert parse(text) == method
    assert canonical(text) == text == Strategy(compression=text).compression


@CHECK
@given(methods())
def test_what_carries_a_method_out_prints_as_it(method: Method) -> None:
    text = text_of(method)
    carrier = compression.parse(text)
    assert carrier.method == method
    assert str(carrier) == text
    assert compression.parse(str(carrier)) == carrier


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("none", Whole()),
        ("fp16", Fp16()),
        ("bf16", Bf16()),
        ("powersgd", PowerSgd(rank=4)),
        ("powersgd:rank=1", PowerSgd(rank=1)),
        ("top-k", TopK(ratio=0.01)),
        ("top-k:ratio=1", TopK(ratio=1)),
    ],
)
def test_canonical_texts(text: str, method: Method) -> None:
    assert parse(text) == method
    assert text_of(method) == text


def test_every_method_is_carried_out() -> None:
    assert set(carriers()) == set(registry.registered(Method).values())


def test_compressions_are_values() -> None:
    carrier = compression.parse("powersgd:rank=2")
    assert hash(carrier) == hash(compression.parse("powersgd:rank=2"))
    with pytest.raises(FrozenInstanceError):
        carrier.method = PowerSgd()  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------- one of your own


@pytest.fixture
def own() -> Iterator[None]:
    """Forgets what a test registers."""
    methods, carried = dict(registry._FAMILIES[Method].entries), dict(base._CARRIERS)
    yield
    for table, before in ((registry._FAMILIES[Method].entries, methods), (base._CARRIERS, carried)):
        table.clear()
        table.update(before)


def signs() -> type[Method]:
    @register("signs")
    @dataclass(frozen=True)
    class Signs(Method):
        scale: float = 1.0

    return Signs


@pytest.mark.usefixtures("own")
def test_one_file_adds_a_compression() -> None:
    method = signs()

    @carries(method)
    @dataclass(frozen=True)
    class SignReduction(Compression[None]):
        method: Method

        def start(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
            return None

        def all_reduce(self, state: None, gradient: torch.Tensor, group: dist.ProcessGroup) -> int:
            return 0

    assert Strategy.parse("replicas=2 compression=signs:scale=0.5").compression == "signs:scale=0.5"
    assert isinstance(compression.parse("signs"), SignReduction)


@pytest.mark.usefixtures("own")
def test_a_method_that_nothing_carries_out_is_refused() -> None:
    signs()
    with pytest.raises(InputError, match=r"nothing that carries it out; write @carries\(Signs\)"):
        compression.parse("signs")
