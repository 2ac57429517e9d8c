"""LayerNorm, RMSNorm and softmax over a dim that is sharded."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.replica.tensor.placements import Shard
from paceline.replica.tensor.rules import normalisation, softmax
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.cases import SHARDS, Case, every_way
from tests.replica.tensor.shard_harness import divided
from tests.replica.tensor.threads import together

WIDTH = 31
"""No k divides it."""


class Between(nn.Module):
    """Two linear layers, so that channels come divided, with something between."""

    def __init__(self, between: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.between, self.last = nn.Linear(5, width), between, nn.Linear(width, 3)
        self.double()
        for parameter in between.parameters():  # as trained: no longer ones and zeros
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x) + 3))  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """RMSNorm in plain operators, as models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class OfSquare(nn.Module):
    """Over two dims, of which the first is divided."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (7, 8))).flatten(-2)  # type: ignore[no-any-return]


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


NORMS = {
    "layer_norm": (lambda: nn.LayerNorm(WIDTH), 2),
    "layer_norm no bias": (lambda: nn.LayerNorm(WIDTH, bias=False), 2),
    "layer_norm plain": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False, eps=0.1), 2),
    "rms_norm": (lambda: nn.RMSNorm(WIDTH), 2),
    "rms_norm plain": (lambda: nn.RMSNorm(WIDTH, eps=0.1, elementwise_affine=False), 2),
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_divided_channels_sends_a_few_numbers_a_row(name: str, count: int) -> None:
    norm, collectives = NORMS[name]
    found = divided(Between(norm()), _x(2, 6), count)
    operator = name.split()[0]
    assert found.strategy(operator) == "channels"
    assert found.redistributions(operator) == [] == found.redistributions("linear")
    assert found.plan.cost.collectives == collectives + 1, "and one for the sum at the end"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_over_two_dims(norm: type[nn.LayerNorm], count: int) -> None:
    found = divided(Between(OfSquare(norm([7, 8])), 56), _x(6), count)
    assert found.strategy("_norm") == "channels"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_rms_norm_by_hand(count: int) -> None:
    found = divided(Between(ByHand()), _x(2, 6), count)
    assert found.redistributions("linear") == [], "the channels stay divided"


class Rows(nn.Module):
    """Normalises samples, heads or rows that are divided, over channels that are not."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (7, 4))).flatten(-2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_of_each_head_sends_nothing(norm: type[nn.LayerNorm], count: int) -> None:
    found = divided(Between(Rows(norm(4)), 28), _x(6), count)
    assert found.strategy("_norm") == "samples"
    assert found.plan.cost.collectives == 1


def test_the_mean_is_taken_away_before_squares_are_summed_up() -> None:
    """Far from zero, a variance from mean squares would have lost its digits."""
    model = Between(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        model.first.bias += 1e5
    divided(model, _x(6), 3, rtol=1e-8)


class Softmax(nn.Module):
    """Along the divided dim."""

    def __init__(self, *, logarithm: bool, dim: int = -1) -> None:
        super().__init__()
        self._logarithm, self._dim = logarithm, dim

    def forward(self, x: Tensor) -> Tensor:
        x = x * 3  # far from uniform
        return x.log_softmax(self._dim) if self._logarithm else x.softmax(self._dim)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax_along_the_divided_dim(logarithm: bool, count: int) -> None:
    found = divided(Between(Softmax(logarithm=logarithm)), _x(2, 6), count)
    assert found.strategy("softmax") == "across"
    assert found.redistributions("softmax") == [] == found.redistributions("linear")
    assert found.plan.cost.collectives == 4, "largest, sum and gradient; and the sum at the end"


def test_softmax_of_large_numbers() -> None:
    model = Between(Softmax(logarithm=False))
    with torch.no_grad():
        model.first.bias += 1e4
    divided(model, _x(6), 2)


@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax_along_another_dim_sends_nothing(logarithm: bool) -> None:
    found = divided(Between(Softmax(logarithm=logarithm, dim=-2)), _x(2, 6), 3)
    assert found.strategy("softmax") == ""
    assert found.plan.cost.collectives == 1


HALF = Shard(-1, (16, 15))


def _norm(shards: TPCollectives, *, centred: bool) -> nn.Module:
    return normalisation.ShardedNorm(shards, "y", HALF, (-1,), torch.bfloat16, eps=0.1, centred=centred)


IN_BF16 = {
    "layer_norm": (partial(_norm, centred=True), lambda x: F.layer_norm(x, (WIDTH,), eps=0.1)),
    "rms_norm": (partial(_norm, centred=False), lambda x: F.rms_norm(x, (WIDTH,), eps=0.1)),
    "softmax": (lambda s: softmax.ShardedSoftmax(s, "y", -1, torch.bfloat16, logarithm=False), lambda x: x.softmax(-1)),
}


@pytest.mark.parametrize("name", IN_BF16)
def test_in_bf16_sums_are_in_float32(name: str) -> None:
    """As torch has them: the result then differs by one rounding of a bf16, whose step is 2^-8 of a number, or less."""
    across, whole = IN_BF16[name]
    x, seed = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    x += 4

    def work(shards: TPCollectives) -> tuple[Tensor, Tensor]:
        part = HALF.take(x, shards.rank).clone().requires_grad_()
        made = across(shards)(part)
        (gradient,) = torch.autograd.grad((made * HALF.take(seed, shards.rank)).sum(), part)
        return made.detach(), gradient

    made, _ = together(2, work)
    whole_x = x.clone().requires_grad_()
    expected = whole(whole_x)
    (gradient,) = torch.autograd.grad((expected * seed).sum(), whole_x)
    found = HALF.concat([part for part, _ in made]), HALF.concat([part for _, part in made])
    for each, right in zip(found, (expected.detach(), gradient), strict=True):
        assert each.dtype == torch.bfloat16
        torch.testing.assert_close(each, right, rtol=2**-8, atol=float(right.abs().max()) * 2**-8)


BOTH = ("samples", "channels")

CASES = (
    Case(
        "layer_norm",
        normalisation.layer_norm,
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        [(4, 6, 8)],
        [(8,), (8,)],
        names=BOTH,
    ),
    Case(
        "layer_norm, weight alone",
        normalisation.layer_norm,
        lambda x, w: F.layer_norm(x, (6, 8), w),
        [(5, 6, 8)],
        [(6, 8)],
        names=BOTH,
    ),
    Case(
        "layer_norm, bias alone",
        normalisation.layer_norm,
        lambda x, b: F.layer_norm(x, (8,), None, b, 0.1),
        [(5, 8)],
        [(8,)],
        names=BOTH,
    ),
    Case(
        "rms_norm",
        normalisation.layer_norm,
        lambda x, w: F.rms_norm(x, (8,), w, 0.1),
        [(4, 6, 8)],
        [(8,)],
        names=BOTH,
    ),
    Case("rms_norm, plain", normalisation.layer_norm, lambda x: F.rms_norm(x, (6, 8)), [(5, 6, 8)], names=BOTH),
    Case("softmax", softmax.softmax, lambda x: x.softmax(-2), [(4, 6, 8)], names=("", "across")),
    Case("log_softmax", softmax.softmax, lambda x: x.log_softmax(1), [(4, 6, 8)], names=("", "across")),
)


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way(case: Case, shards: tuple[int, ...]) -> None:
    every_way(case, shards)
