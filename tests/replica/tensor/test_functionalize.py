"""Writes in place become operators that have a rule, if no difference can be observed; and nowhere else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.capture.capture import Captured, capture
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.sharding_plan import ShardingPlan, plan_sharding
from tests.replica.tensor.cases import eager, holds_its_part, same, split_share

aten = torch.ops.aten


class Around(nn.Module):
    """Something between a parameter and the output."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function
        self.scale = nn.Parameter(numbers(4, 6))
        self.register_buffer("seen", torch.zeros(4, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> object:
        return self._function(x * self.scale, x, self)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def written(model: nn.Module, x: Tensor) -> Captured:
    """The graph after the pass, which has to do what the model does, outputs, gradients and buffers."""
    captured = capture(model, x, operators=True)
    names = [node.name for node in captured.module.graph.nodes]
    functionalize(captured.module)
    assert [node.name for node in captured.module.graph.nodes] == names
    captured.module.graph.lint()
    same(plan_sharding(operator_graph(captured, 2), 2), model, x)
    return captured


def targets(captured: Captured) -> list[object]:
    return [node.target for node in captured.module.graph.nodes if node.op == "call_function"]


def in_place(captured: Captured) -> list[str]:
    found = [t._schema for t in targets(captured) if isinstance(t, torch._ops.OpOverload)]
    return [schema.name.removeprefix("aten::") for schema in found if schema.is_mutable]


REPLACED = {
    "relu_": lambda y, x, m: F.relu(y, inplace=True),
    "its own name used": lambda y, x, m: (y.relu_(), y + 1)[1],
    "add_": lambda y, x, m: y.add_(x, alpha=2).sum(1),
    "add_ of itself": lambda y, x, m: y.add_(y),
    "clamp_": lambda y, x, m: y.clamp_(min=-0.5, max=0.5),
    "masked_fill_": lambda y, x, m: y.masked_fill_(x > 0, 2.0),
    "hardtanh_": lambda y, x, m: F.hardtanh(y, inplace=True),
    "leaky_relu_": lambda y, x, m: F.leaky_relu(y, 0.1, inplace=True),
    "dropout_ of nothing": lambda y, x, m: F.dropout(y, 0.0, inplace=True) + 1,
    "one after the other": lambda y, x, m: y.add_(1).mul_(3).relu_(),
    "a view made after": lambda y, x, m: y.add_(1).flatten(1).sum(1) * y.sum((1, 2)),
    "a view that is dead": lambda y, x, m: (y.flatten(1) + 1, y.add_(1))[1] * 2,
    "a view of what is dead": lambda y, x, m: y.flatten(1).add_(2) * 2,
    "it is an output": lambda y, x, m: (y, y.add_(1)),
    "a copy of an input": lambda y, x, m: x.clone().add_(y),
    "a copy of a parameter": lambda y, x, m: (m.scale * 1).add_(y.sum(0)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced(name: str) -> None:
    captured = written(Around(REPLACED[name]), numbers(5, 4, 6))
    assert not in_place(captured)


def halves_written(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    y[:, :2] = 0
    return y


def both_views(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    first, second = y.view(-1, 24), y.view(-1, 24)
    first.add_(1)
    return second * 2


def detached(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    y.detach().mul_(2)
    return y + 1


def broadcast(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    first, _ = torch.broadcast_tensors(y, x)
    first.add_(1)
    return y * 3


def counted(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    m.seen.add_(y.detach().sum(0))  # type: ignore[union-attr, operator]
    return y + m.seen  # type: ignore[operator]


def twice(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
    view = y.view(-1, 24)
    y.add_(1)
    y.add_(2)
    return view + y.flatten(1)


LEFT = {
    "a view used after": (lambda y, x, m: (y.flatten(1), y.add_(1))[0] * 2, ["add_"]),
    "of a view, its base used after": (lambda y, x, m: (y.flatten(1).add_(1), y * 2)[1], ["add_"]),
    "a slice of it": (halves_written, ["fill_"]),
    "another view used after": (both_views, ["add_"]),
    "detached, and used after": (detached, ["mul_"]),
    "a view that does not say so": (broadcast, ["add_"]),
    "a buffer": (counted, ["add_"]),
    "twice, and a view used after": (twice, ["add_", "add_"]),
    "no twin that has a rule": (lambda y, x, m: y.copy_(x) * m.scale, ["copy_"]),
    "random": (lambda y, x, m: y.clone().uniform_() * 0 + y, ["uniform_"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is(name: str) -> None:
    function, kept = LEFT[name]
    assert in_place(written(Around(function), numbers(5, 4, 6))) == kept


@pytest.mark.parametrize("through_a_view", [False, True])
def test_an_input_is_left_for_whoever_gave_it_sees_it(through_a_view: bool) -> None:
    def function(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
        return (x.flatten(1) if through_a_view else x).add_(1).sum() * m.scale  # type: ignore[operator]

    captured, x = capture(Around(function), numbers(5, 4, 6), operators=True), numbers(5, 4, 6)
    functionalize(captured.module)
    captured.module(x)
    assert in_place(captured) == ["add_"]
    assert torch.equal(x, numbers(5, 4, 6) + 1)


def test_dropout_drops_the_same() -> None:
    captured = capture(Around(lambda y, x, m: F.dropout(y, 0.4, inplace=True)), numbers(5, 4, 6), operators=True)
    found = []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            found.append(captured.module(numbers(5, 4, 6))[0])
        functionalize(captured.module)
    assert not in_place(captured)
    assert torch.equal(*found)
    assert 0 < (found[0] == 0).sum() < found[0].numel()


def test_another_type_is_left() -> None:
    def rounded(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
        return y.float().add_(x).double()

    assert in_place(written(Around(rounded), numbers(5, 4, 6))) == ["add_"]


def test_another_order_in_memory_is_left() -> None:
    def sliced(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
        return y[:, :, ::2].add_(1) * 2

    assert in_place(written(Around(sliced), numbers(5, 4, 6))) == ["add_"]


def test_of_one_that_was_left_the_next_may_be_replaced() -> None:
    def after(y: Tensor, x: Tensor, m: nn.Module) -> Tensor:
        view = y.view(-1, 24)
        y.add_(1)
        kept = view * 2
        return y.mul_(3).flatten(1) + kept + y.flatten(1)

    assert in_place(written(Around(after), numbers(5, 4, 6))) == ["add_"]


class Block(nn.Module):
    """Of a residual network, as it is mostly written: or with nothing in place."""

    def __init__(self, channels: int, *, inplace: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu, self._inplace = nn.ReLU(inplace=inplace), inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.nb(self.b(self.relu(self.na(self.a(x)))))
        if self._inplace:
            y += x
        else:
            y = y + x
        return self.relu(y)


def residual(*, inplace: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        stem = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=inplace))
        blocks = [Block(6, inplace=inplace) for _ in range(2)]
        return nn.Sequential(stem, *blocks, nn.Flatten(), nn.Linear(96, 5)).double()


def planned(model: nn.Module, x: Tensor, k: int) -> ShardingPlan:
    captured = capture(model, x, operators=True)
    functionalize(captured.module)
    return plan_sharding(operator_graph(captured, k), k)


@pytest.mark.parametrize("k", [2, 3])
def test_a_residual_network_is_divided_as_if_nothing_were_in_place(k: int) -> None:
    x, model = numbers(5, 3, 6, 6), residual(inplace=True)
    made, other = planned(model, x, k), planned(residual(inplace=False), x, k)
    assert made.cost == other.cost
    assert made.parameters == other.parameters
    same(made, model, x, f"k = {k}")
    holds_its_part(made, model)
    assert split_share(made, model) > 0.9
    before = operator_graph(capture(model, x, operators=True), k)
    assert plan_sharding(before, k).cost > made.cost


def test_nodes_keep_their_owners() -> None:
    captured = capture(residual(inplace=True), numbers(5, 3, 6, 6), operators=True)
    owners = dict(captured.owners)
    functionalize(captured.module)
    relus: list[Node] = [node for node in captured.module.graph.nodes if node.target is aten.relu.default]
    assert [owners[node.name] for node in relus] == ["0.2", "1.relu", "1.relu", "2.relu", "2.relu"]


def test_the_graph_itself_runs_as_before() -> None:
    model, x = residual(inplace=True), numbers(5, 3, 6, 6)
    expected = eager(model, x).outputs
    captured = capture(model, x, operators=True)
    functionalize(captured.module)
    assert "relu_.default" not in captured.module.code
    assert torch.equal(captured.module(x)[0], expected[0])
