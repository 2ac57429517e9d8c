"""A backward pass in two halves: gradients of inputs, then those of weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from paceline.replica.activation_memory import StorageCounter
from paceline.replica.capture.capture import capture
from paceline.replica.pipeline.split_backward import DeferredWeightGrads, Splitter, replace_ops

ROUNDING = 1e-13
"""The same products of float64 numbers of size about 1, in shapes that may be added up in another order."""


class Addmm(nn.Module):
    """As GPT-2 has it: the weight stands upright."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Complex(nn.Module):
    """Its gradients are products with conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.complex(x, x.square())).abs()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), set()),
    "linear of three dims": (lambda: nn.Linear(4, 3, bias=False), (2, 5, 4), set()),
    "convolution in one dim": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9), set()),
    "convolution in two dims": (lambda: nn.Conv2d(4, 6, (3, 2), dilation=(1, 2)), (2, 4, 7, 6), set()),
    "convolution in three dims": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 2, 3, 4, 3), set()),
    "one sample": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 6), {"weight", "bias"}),
    "padding in words": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 6), {"weight", "bias"}),
    "attention": (Attention, (2, 5, 4), set()),
    "complex numbers": (Complex, (5, 4), {"inner.weight", "inner.bias"}),
    "norm and linear": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), (5, 4), {"0.weight", "0.bias"}),
}
"""Name -> layer, shape of its input, and the parameters whose gradients come with that of the input."""


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def halves(module: nn.Module, run: Callable[[Tensor], Tensor], shape: tuple[int, ...], at_once: set[str]) -> None:
    """Backward twice over, in halves; after each the gradients are those of plain autograd."""
    splitter = Splitter("cpu")
    plain = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for seed in (1, 2):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        found = torch.autograd.grad(run(x).sin().sum(), [x, *module.parameters()])
        for name, gradient in zip(plain, found[1:], strict=True):
            plain[name] += gradient
        if seed == 1:
            assert replace_ops([module], splitter.replacements)
        later = DeferredWeightGrads()
        with splitter.deferring_to(later):
            loss = run(x).sin().sum()
        before = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        loss.backward()
        torch.testing.assert_close(x.grad, found[0], rtol=ROUNDING, atol=ROUNDING)
        moved = {n for n, p in module.named_parameters() if p.grad is not None and not _same(p.grad, before.get(n))}
        assert moved == at_once
        later.run()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, plain[name], rtol=ROUNDING, atol=ROUNDING)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_called_whole(name: str) -> None:
    make, shape, at_once = LAYERS[name]
    module = made(make)
    halves(module, module, shape, at_once)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("one sample", "padding in words")])
def test_nodes_of_a_captured_graph(name: str) -> None:
    make, shape, at_once = LAYERS[name]
    module = made(lambda: nn.ModuleList([make()]))
    wrapped: Any = Wrapped(module[0])
    graph = capture(wrapped, torch.randn(shape, dtype=torch.float64)).module
    halves(graph, lambda x: graph(x)[0], shape, {f"inner.{each}" for each in at_once})


class Wrapped(nn.Module):
    """No nn.Sequential, so it goes through export."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_product_with_an_upright_weight() -> None:
    graph = capture(made(Addmm), torch.randn(5, 4, dtype=torch.float64)).module
    halves(graph, lambda x: graph(x)[0], (5, 4), set())


def test_a_weight_that_is_computed_is_left_to_autograd() -> None:
    module = nn.utils.parametrizations.weight_norm(made(lambda: nn.Linear(4, 3)))
    names = {name for name, _ in module.named_parameters()}
    halves(module, module, (5, 4), names)


def test_without_a_graph_nothing_is_put_off() -> None:
    module, splitter, later = made(lambda: nn.Linear(4, 3)), Splitter("cpu"), DeferredWeightGrads()
    replace_ops([module], splitter.replacements)
    x = torch.randn(2, 4, dtype=torch.float64)
    with splitter.deferring_to(later), torch.no_grad():
        assert not module(x).requires_grad
    module(x).sum().backward()  # nor outside a pass of its part
    assert module.weight.grad is not None


def test_what_is_kept_for_weights_is_their_input_and_a_gradient() -> None:
    module, splitter, later = made(lambda: nn.Linear(4, 3)), Splitter("cpu"), DeferredWeightGrads()
    replace_ops([module], splitter.replacements)
    with splitter.deferring_to(later):
        loss = module(torch.randn(5, 4, dtype=torch.float64)).sum()
    loss.backward()
    tally = StorageCounter(module.parameters())
    tally.add(value for _, arguments in later.calls for value in arguments)
    # A sum's gradient is one number that stands for all.
    assert tally.nbytes == (5 * 4 + 1) * 8


def test_a_graph_without_such_operators_is_left_as_it_is() -> None:
    graph = symbolic_trace(nn.Sequential(nn.Tanh(), nn.LayerNorm(4)))
    assert not replace_ops([graph], Splitter("cpu").replacements)
