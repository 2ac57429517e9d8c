"""A captured model that another process takes over is the same: nodes, sizes, memory in common, results."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.program import leaves
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.handover import attached, packed
from tests.zoo import ZOO


def memory(captured: Captured) -> list[list[int]]:
    """For each node, the numbers of the storages of its results."""
    numbers: dict[int, int] = {}
    rows = []
    for node in captured.module.graph.nodes:
        value = node.meta.get("val")
        results = value if isinstance(value, (list, tuple)) else [value]
        storages = [each.untyped_storage()._cdata for each in results if isinstance(each, Tensor)]
        rows.append([numbers.setdefault(storage, len(numbers)) for storage in storages])
    return rows


def sizes(captured: Captured) -> list[str]:
    return [str(getattr(node.meta.get("val"), "shape", None)) for node in captured.module.graph.nodes]


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("others", [None, ()])
def test_a_model_taken_over_is_the_same(name: str, others: Any) -> None:
    job = ZOO[name]()
    module = job.model()
    captured = capture(module, job.inputs, operators=True, others=others)
    content = packed(captured)
    assert content is not None
    twin = copy.deepcopy(module)
    other = attached(content, twin)
    assert str(other.module.graph) == str(captured.module.graph)
    assert (memory(other), sizes(other)) == (memory(captured), sizes(captured))
    assert (other.owners, other.input_spec.leaves) == (captured.owners, captured.input_spec.leaves)
    held = dict(other.module.named_parameters())
    assert all(held[name] is parameter for name, parameter in twin.named_parameters())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        expected = captured.rebuild(captured.module(*captured.flatten(job.inputs)))
        torch.manual_seed(1)
        found = other.rebuild(other.module(*other.flatten(job.inputs)))
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


def test_its_own_tensors_are_not_among_the_bytes() -> None:
    module = nn.Sequential(nn.Linear(500, 500), nn.ReLU())
    content = packed(capture(module, torch.ones(3, 500), operators=True))
    assert content is not None
    assert len(content) < 100_000 < module[0].weight.nbytes


def test_another_model_is_refused() -> None:
    content = packed(capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4), operators=True))
    assert content is not None
    with pytest.raises(PacelineError, match=r"does not fit the model here, which has no 0.*; model\(\) must make"):
        attached(content, nn.Linear(4, 4))


def test_children_that_run_as_they_are_are_not_handed_over() -> None:
    assert packed(capture(nn.Sequential(nn.Linear(4, 4)), torch.ones(3, 4))) is None
