"""nn.Sequential without tracing: one call per child, whatever the child is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.errors import InputError
from paceline.replica.capture.capture import capture


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Split(nn.Module):
    def forward(self, value: Tensor) -> dict[str, Any]:
        return {"left": value[:, :2], "rest": (value[:, 2:], [value, 3])}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, parts: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        right, (value, times) = parts["rest"]
        return self.layer(parts["left"]) + right, {"value": value * times, "none": None}


def test_children_of_nested_ones_are_calls_by_their_full_names() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))).double()
    captured = capture(module, numbers(3, 4))
    calls = [node for node in captured.module.graph.nodes if node.op == "call_module"]
    assert [node.target for node in calls] == ["0", "1.0", "1.1.0"]
    assert [captured.owners[node.name] for node in calls] == ["0", "1.0", "1.1.0"]
    assert captured.module.get_submodule("1.1.0") is module[1][1][0]
    assert [name for name, _ in captured.module.named_parameters()] == [name for name, _ in module.named_parameters()]


def test_trees_between_children_are_taken_apart_into_their_leaves() -> None:
    module, value = nn.Sequential(Split(), Join()), numbers(3, 4)
    captured = capture(module, value)
    join = next(node for node in captured.module.graph.nodes if node.target == "1")
    assert all(captured.owners[node.name] == "0" for node in join.all_input_nodes)
    assert len(join.all_input_nodes) == 4
    found = captured.rebuild(captured.module(*captured.flatten(value)))
    expected = module(value)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1]["value"], expected[1]["value"])
    assert found[1]["none"] is None


def test_an_input_may_be_a_tree_in_a_tuple() -> None:
    module = nn.Sequential(Join())
    inputs = ({"left": numbers(3, 2), "rest": (numbers(3, 2), [numbers(3, 2), 3])},)
    captured = capture(module, inputs)
    assert len(captured.flatten(inputs)) == 3
    assert torch.equal(captured.module(*captured.flatten(inputs))[0], module(*inputs)[0])


def test_a_child_may_stand_in_several_places() -> None:
    layer = nn.Linear(4, 4, dtype=torch.float64)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    captured = capture(module, numbers(3, 4))
    assert [node.target for node in captured.module.graph.nodes if node.op == "call_module"] == ["0", "1", "0"]
    assert torch.equal(captured.module(numbers(5, 4))[0], module(numbers(5, 4)))


class Residual(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return value + super().forward(value)


def test_a_subclass_with_a_forward_of_its_own_is_traced_alone_and_called_inside() -> None:
    block = Residual(nn.Linear(4, 4), nn.Tanh()).double()
    alone = capture(block, numbers(3, 4))
    assert not [node for node in alone.module.graph.nodes if node.op == "call_module"]
    assert torch.equal(alone.module(numbers(5, 4))[0], block(numbers(5, 4)))
    inside = capture(nn.Sequential(block, nn.Sequential(nn.ReLU())), numbers(3, 4))
    assert [node.target for node in inside.module.graph.nodes if node.op == "call_module"] == ["0", "1.0"]


def test_hooks_of_a_nested_one_run() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    inner.register_forward_hook(lambda module, given, output: 2 * output)
    module = nn.Sequential(inner)
    captured = capture(module, numbers(3, 4))
    assert torch.equal(captured.module(numbers(5, 4))[0], module(numbers(5, 4)))


def test_several_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="Sequential takes one argument, but its inputs are 2; give it a tensor, or a"):
        capture(nn.Sequential(nn.Linear(4, 4)), (numbers(3, 4), numbers(3, 4)))


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        hidden = paceline.cut(self.layers[0](value))
        hidden, value = paceline.cut(self.layers[1](hidden), value)
        return self.layers[2](hidden) + value


def test_a_mark_is_the_identity_without_a_copy() -> None:
    value, other = numbers(3, 4), numbers(2)
    assert paceline.cut(value) is value
    assert [a is b for a, b in zip(paceline.cut(value, other), (value, other), strict=True)] == [True, True]


def test_marks_stay_in_the_graph_and_gradients_go_through_them() -> None:
    module, value = Marked(), numbers(3, 4)
    captured = capture(module, value)
    marks = [node for node in captured.module.graph.nodes if node.target is torch.ops.paceline.cut.default]
    assert [len(node.args[0]) for node in marks] == [1, 2]
    parameters = list(module.parameters())
    found = torch.autograd.grad(captured.module(value)[0].square().sum(), parameters)
    expected = torch.autograd.grad(module(value).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
