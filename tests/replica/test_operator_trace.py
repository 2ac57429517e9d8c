"""The operators that a function calls, as a graph: nothing is changed by its being run, and little is imported."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import InputError
from paceline.replica.operator_list import as_it_is, operators_of, write_outputs
from paceline.replica.operator_trace import trace


def ran(function: Callable[..., Sequence[Tensor]], traced: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """What the graph of a function makes of other tensors than those that it was traced on."""
    operators, constants = operators_of(trace(function, traced))
    with as_it_is():
        return list(operators(*given, *constants))


def test_what_is_written_is_undone_and_written_by_the_graph() -> None:
    flat = torch.arange(6.0)
    first, second, given = flat[:3], flat[3:], torch.full((3,), 10.0)

    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        one, other = tensors
        one[1:].add_(other[1:])
        return [one.sum()]

    (total,) = ran(function, [first, second], [given, torch.ones(3)])
    assert torch.equal(flat, torch.arange(6.0))
    assert torch.equal(given, torch.tensor([10.0, 11.0, 11.0]))
    assert total == 32.0


def test_it_is_undone_where_the_function_fails() -> None:
    given = torch.zeros(3)

    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors[0].add_(1.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(function, [given])
    assert torch.equal(given, torch.zeros(3))


def test_one_tensor_may_be_two_inputs() -> None:
    both = torch.ones(2)
    (difference,) = ran(lambda given: [given[0] - given[1]], [both, both], [torch.ones(2), torch.zeros(2)])
    assert torch.equal(difference, torch.ones(2))


def test_what_was_there_before_is_read_anew_and_what_is_made_of_numbers_is_made_anew() -> None:
    outside = torch.ones(2)

    def function(given: Sequence[Tensor]) -> list[Tensor]:
        return [given[0] + outside, torch.tensor([1.0, 2.0]).mul_(given[0])]

    operators, constants = operators_of(trace(function, [torch.zeros(2)]))
    with as_it_is():
        operators(torch.ones(2), *constants)
    outside.fill_(5.0)
    found = operators(torch.full((2,), 3.0), *constants)
    assert [tensor.tolist() for tensor in found] == [[8.0, 8.0], [3.0, 6.0]]


def written(given: Sequence[Tensor]) -> list[Tensor]:
    """A loss, and what is like gradients: a product, a sum of another shape, which is two of them, and others."""
    x, y = given
    product, total = x @ y, x.sum(0, keepdim=True).view(-1)
    return [product.sum(), product, total, total, x, y.t().contiguous()]


@pytest.mark.parametrize("shift", [0, 1])
def test_outputs_are_written_where_they_belong(shift: int) -> None:
    """Products and sums at once, if that begins at a cache line; what is twice the same is copied once more."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(16, 16, generator=draw) for _ in range(2)]
    module = trace(written, [torch.ones(16, 16), torch.zeros(16, 16)])
    expected = written(inputs)[1:]
    sizes = [value.numel() for value in expected]
    flat = torch.full((sum(sizes) + 16,), torch.nan)
    places = [
        part.view_as(value) for part, value in zip(flat[shift:].split([*sizes, 16 - shift]), expected, strict=False)
    ]
    assert flat.data_ptr() % 64 == 0
    write_outputs(module, places)
    operators, constants = operators_of(module)
    calls = {name: f"aten.{name}.default" for name in ("copy_", "clone")}
    count = Counter(str(node.target) for node in module.graph.nodes)
    assert count[calls["copy_"]] == (3 if shift == 0 else 5)
    assert not count[calls["clone"]]
    with as_it_is():
        returned = operators(*inputs, *places, *constants)
    assert torch.equal(returned[0], expected[0].sum())
    assert len(returned) == 1
    for place, value in zip(places, expected, strict=True):
        assert torch.equal(place, value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x * x.sum().item(),
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: torch.from_numpy(x.numpy()) + x,
        lambda x: x * torch.tensor(x.tolist()),
        lambda x: x * x.data_ptr(),
        lambda x: x * torch.from_dlpack(x),
    ],
)
def test_what_depends_on_values_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputError, match="it asks for the values of a tensor"):
        trace(lambda given: [function(given[0])], [torch.ones(3)])


def test_a_refusal_that_is_caught() -> None:
    def caught(x: Tensor) -> Tensor:
        try:
            return x * x.sum().item()
        except Exception:
            return x

    with pytest.raises(InputError, match="asks for the values of a tensor"):
        trace(lambda given: [caught(given[0])], [torch.ones(3)])


def test_numbers_that_are_drawn_for_nothing_are_drawn() -> None:
    def draws(given: Sequence[Tensor]) -> list[Tensor]:
        (x,) = given
        torch.rand_like(x)
        torch.native_dropout(x, 0.5, True)  # it has two results
        x.clone().uniform_()
        F.dropout(x)
        return [F.dropout(x)]

    x = torch.ones(64)
    run, _ = operators_of(trace(draws, [x]))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = draws([x])
        torch.manual_seed(seed)
        found = run(x)
        assert len(found) == 1
        assert torch.equal(found[0], expected[0])


def test_an_index_by_numbers_is_none_by_values() -> None:
    (found,) = ran(lambda given: [given[0][given[1]]], [torch.ones(3), torch.zeros(2, dtype=torch.long)],
                   [torch.arange(3.0), torch.tensor([2, 1])])  # fmt: skip
    assert found.tolist() == [2.0, 1.0]


SCRIPT = """
import sys
import torch
from torch.nn.functional import cross_entropy
from paceline import Program
from paceline.replica.base import Batch
from paceline.replica.step_graph import StepGraphs

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))

inputs, targets = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
program = Program(model, cross_entropy, torch.optim.SGD, (inputs, targets))
StepGraphs(program, model().train(), torch.device("cpu")).check(Batch(inputs, targets, 5))
print(sorted(name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules))
"""


def test_a_model_is_traced_and_compared_without_a_compiler() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=100)
    assert found.stdout.strip() == "[]"
