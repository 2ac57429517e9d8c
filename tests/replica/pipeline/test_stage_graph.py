"""Passes that run as lists of operators: the bits of plain ones, and plain ones where they would do something else."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from paceline.replica.pipeline import stage_graph
from paceline.replica.pipeline.micro_batches import MicroBatch
from paceline.replica.pipeline.stage import PipelineStage
from paceline.replica.pipeline.stage_graph import PartGraph, ShortPasses
from tests.replica.pipeline.hand_cuts import Chain, Norms, Skips, Tied, by_hand
from tests.replica.pipeline.pipeline_world import World, batches, build, program
from tests.replica.pipeline.test_pipelined import Dropping


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PartGraph]:
    """The graphs that passes had, of which each form has one from its second pass on."""
    found: list[PartGraph] = []
    run = ShortPasses.run
    stage_graph._importing().join()

    def counted(self: Any, graph: PartGraph, *words: Any) -> Any:
        found.append(graph)
        return run(self, graph, *words)

    monkeypatch.setattr(ShortPasses, "run", counted)
    monkeypatch.setattr(stage_graph, "WARM_S", 0.0)
    monkeypatch.setattr(stage_graph, "SHORT_PASS_S", math.inf)
    return found


def gradients(kind: type[nn.Module], schedule: str, workers: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Those of five mini-batches, of which the last has fewer samples."""
    world = World(program(kind), kind, schedule, workers, 4, options)
    found = []
    for batch in batches(kind, 8, 8, 8, 8, 12 if kind is Norms else 5):
        world.all(lambda member, batch=batch: member.step(batch))
        found.append({name: value.clone() for name, value in world.gradients().items()})
    return found


def assert_equal(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


CASES = [
    (Chain, "gpipe", 2),
    (Skips, "1f1b", 3),
    (Tied, "1f1b", 4),
    (Norms, "gpipe", 2),
    (Chain, "interleaved:chunks=2", 2),
    (Dropping, "1f1b", 1),  # threads share torch's generator
]


@pytest.mark.parametrize(("kind", "schedule", "workers"), CASES)
def test_it_has_the_bits_of_plain_passes(
    made: list[PartGraph], monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], schedule: str, workers: int
) -> None:
    graphs = gradients(kind, schedule, workers)
    assert made
    made.clear()
    monkeypatch.setattr(stage_graph, "SHORT_PASS_S", 0.0)  # no pass is as short
    plain = gradients(kind, schedule, workers)
    assert not made
    assert_equal(graphs, plain)


def test_gradients_may_come_in_any_order(made: list[PartGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by rank of their messages; a graph takes them by its outputs, of which two may have one shape."""
    expected, backward, several = gradients(Skips, "gpipe", 3), PipelineStage.backward, list[int]()

    def reversed_(self: Any, micro_batch: Any, given: Any, *words: Any, **options: Any) -> Any:
        several.append(len(given))
        return backward(self, micro_batch, dict(reversed(given.items())), *words, **options)

    monkeypatch.setattr(PipelineStage, "backward", reversed_)
    assert_equal(gradients(Skips, "gpipe", 3), expected)
    assert made
    assert max(several) > 1


def test_unknown_objects_in_a_target_are_no_obstacle(made: list[PartGraph]) -> None:
    class Unknown:
        __hash__ = None  # type: ignore[assignment]

    part = by_hand(build(Chain), ["l1"]).parts[1]
    passes = ShortPasses(part, lambda outputs, target: (outputs, torch.zeros(())), nullcontext)
    batch = MicroBatch(0, 1, [], {"x": Unknown()}, ())
    assert passes.of(batch, [], idle=True) == (None, None)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("zero-bubble", {}), ("1f1b", {"recompute": "boundaries"}), ("1f1b", {"batchnorm": "mini-batch"})],
)
def test_what_happens_between_operators_is_left_as_it_is(
    made: list[PartGraph], schedule: str, options: dict[str, Any]
) -> None:
    gradients(Norms, schedule, 2, **options)
    assert not made


def test_a_part_that_errs_as_a_graph_goes_on_as_it_is(made: list[PartGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    simplify = stage_graph.simplify

    def wrong(module: GraphModule) -> None:
        simplify(module)
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh_backward.default):
            node.target = torch.ops.aten.sigmoid_backward.default

    with monkeypatch.context() as patch:
        patch.setattr(stage_graph, "simplify", wrong)
        erring = gradients(Chain, "gpipe", 2)
    assert len(made) == 0
    monkeypatch.setattr(stage_graph, "SHORT_PASS_S", 0.0)
    assert_equal(erring, gradients(Chain, "gpipe", 2))


def test_gradients_of_outputs_may_have_any_strides() -> None:
    """A part may send a view of a weight, whose gradient comes back dense."""

    class Sends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.sin() @ self.weight.t(), self.weight.t()

    module, value = Sends(), torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    graph = stage_graph.checked_graph(module, [value])
    outputs, kept = graph.run([module.weight], [value])
    upstream = [torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64).t()]
    values, parameters = graph.gradients(kept, upstream)
    expected = torch.autograd.grad(module(value), [value, module.weight], upstream)
    for found, gradient in zip([*values, *parameters], expected, strict=True):
        assert torch.equal(found, gradient)
    assert parameters[0].is_contiguous()
    assert [output.shape for output in outputs] == [(4, 5), (3, 5)]
