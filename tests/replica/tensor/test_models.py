"""Whole models on shards that are threads: outputs, gradients and buffers by name, and what each shard has."""

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.shard_check import check_shard
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.cases import holds_its_part, own, planned, same, split_share
from tests.replica.tensor.threads import together
from tests.zoo import ZOO, Job


def without_dropout(model: nn.Module) -> nn.Module:
    """Threads draw their random numbers from one generator."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def made(name: str) -> tuple[nn.Module, Job]:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        job = ZOO[name]()
        return without_dropout(job.model()), job


SMALL = ("mlp", "cnn", "unet", "inception", "masked", "tied", "encoder")
LARGE = ("gpt2", "bert", "vit", "resnet")


@pytest.mark.parametrize(
    ("name", "k"), [*((name, k) for name in SMALL for k in (2, 3, 4)), *((name, 2) for name in LARGE)]
)
def test_shards_are_the_model(name: str, k: int) -> None:
    model, job = made(name)
    plan = planned(model, job.inputs, k)
    same(plan, model, job.inputs, f"{name}, k = {k}")
    holds_its_part(plan, model)
    assert split_share(plan, model) > 0.2, "much of it is divided"


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_nearly_all_of_it_is_divided(name: str) -> None:
    model, job = made(name)
    assert split_share(planned(model, job.inputs, 2), model) >= 0.95


class Grouped(nn.Module):
    """Grouped-query attention: two heads of queries look at one of keys and values."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        width = 4 * heads
        self.heads, self.groups = heads, groups
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, 4 * groups), nn.Linear(width, 4 * groups)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (-1, 4)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x))
        )  # fmt: skip
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Attention of plain operators, as it is taught."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, width = heads, 4 * heads
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            made.view(samples, length, self.heads, 4).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x))
        )
        weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(samples, length, width))


class Fused(nn.Module):
    """Queries, keys and values of one product."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, 4 * heads
        self.qkv, self.out = nn.Linear(self.width, 3 * self.width), nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(2))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    "make",
    [lambda: Grouped(6, 3), lambda: Grouped(8, 4), lambda: ByHand(5), lambda: ByHand(4), lambda: Fused(4)],
    ids=["3 groups", "4 groups", "by hand, 5 heads", "by hand, 4 heads", "fused"],
)
def test_attention_is_divided_by_heads(make: type[nn.Module], k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model = make().double()
    x = numbers(5, 7, model.out.in_features)  # type: ignore[arg-type, union-attr]
    plan = planned(model, x, k)
    calls = same(plan, model, x, f"k = {k}")
    holds_its_part(plan, model)
    assert split_share(plan, model) == 1
    assert calls == {"all_reduce": 1}, "of the output alone: the input has no gradient"
    same(plan, model, x[:2], f"k = {k}, fewer samples")


@pytest.mark.parametrize("k", [2, 3])
def test_a_batch_may_have_another_size(k: int) -> None:
    model, job = made("encoder")
    plan = planned(model, job.inputs, k)
    for samples in (2, 4):
        same(plan, model, job.inputs[:samples], f"{samples} samples")


@pytest.mark.parametrize("k", [2, 3])
def test_some_parameters_may_be_frozen(k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model = nn.Sequential(nn.LayerNorm(20), Fused(5), nn.LayerNorm(20), ByHand(5)).double()
    model[0].requires_grad_(False)
    model[1].qkv.requires_grad_(False)  # type: ignore[union-attr]
    model[3].q.requires_grad_(False)  # type: ignore[union-attr]
    x = numbers(3, 7, 20)
    plan = planned(model, x, k)
    same(plan, model, x, f"k = {k}")
    holds_its_part(plan, model)


class Spectral(nn.Module):
    """A filter of the spectrum, whose parameter is real, as in an FNO, and a layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 2))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(6, 4)
        self.middle = nn.Linear(5, 6, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x)) * torch.view_as_complex(self.filter)
        return self.last(self.middle(spectrum).abs())


@pytest.mark.parametrize("k", [2, 3])
def test_complex_values_have_gradients(k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(12)
        model = Spectral().double()
    plan = planned(model, numbers(5, 8), k)
    same(plan, model, numbers(5, 8), f"k = {k}")
    assert split_share(plan, model) > 0.2, "much of it is divided"


class TwoTypes(nn.Module):
    """A shard without the last layer's bias has gradients of the other type alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12, dtype=torch.float32), nn.Linear(12, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.float()).relu().double())


@pytest.mark.parametrize("k", [2, 3])
def test_each_gradient_is_checked_in_its_own_type(k: int) -> None:
    model, x = TwoTypes(), numbers(5, 6)
    plan = planned(model, x, k)

    def checked(shards: TPCollectives) -> None:
        module = copy.deepcopy(model)
        check_shard(own(rewrite_for_shard(plan, shards)), plan.graph.captured, module, x, shards, samples=(2,))

    together(k, checked)
