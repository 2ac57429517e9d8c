"""Passes that run as lists of operators: the bits of plain ones, and plain ones where they would do something else."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from paceline.replica.pipeline import stage, stage_graph
from paceline.replica.pipeline.micro_batches import MicroBatch
from paceline.replica.pipeline.stage import PipelineStage
from paceline.replica.pipeline.stage_graph import PartGraph, ShortPasses
from tests.replica.pipeline.hand_cuts import BORDERS, Chain, Norms, Skips, Tied, by_hand
from tests.replica.pipeline.pipeline_world import World, batches, build, program
from tests.replica.pipeline.test_pipelined import Dropping


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PartGraph]:
    """The graphs that passes had, of which each form has one from its second pass on."""
    found: list[PartGraph] = []
    run = ShortPasses.run

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
    (Chain, "zero-bubble", 2),
    (Skips, "zero-bubble", 3),
    (Tied, "zero-bubble", 4),
    (Norms, "zero-bubble", 4),
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
    if schedule == "zero-bubble":
        assert_equal(graphs, gradients(kind, "1f1b", workers))  # autograd's bits, too


def test_a_graph_puts_off_what_it_is_told_to() -> None:
    """Of a layer norm between two products: in a first part what several gradients need comes at once, too."""
    middle = _Listed(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6)).double())
    value, upstream = torch.randn(4, 6, dtype=torch.float64), [torch.randn(4, 6, dtype=torch.float64)]
    products = {f"inner.{k}.{name}" for k in (0, 3) for name in ("weight", "bias")}
    for inputs in ([value], [value.clone().requires_grad_()]):
        graph = stage_graph.checked_graph(middle, inputs, put_off=products)
        assert graph.names == ["inner.1.weight", "inner.1.bias"]
        assert set(graph.put_off) == products
        tensors = dict(middle.named_parameters())
        outputs, kept = graph.run(list(tensors.values()), inputs)
        values, parameters, left = graph.gradients(kept, upstream)
        sources = [tensors[name] for name in (*graph.names, *graph.put_off)]
        expected = torch.autograd.grad(middle(*inputs), sources, upstream)
        assert all(map(torch.equal, [*parameters, *graph.rest(left)], expected))
        assert len(values) == inputs[0].requires_grad
        assert torch.equal(outputs[0], middle(*inputs)[0])
    assert stage_graph.checked_graph(middle, [value]).weights is None


class Twice(nn.Module):
    """A layer that is used twice in its part, and a weight that is used in another way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.l1(self.l0(x).tanh().add(self.l0(x)))
        return self.l3(self.l2(h).tanh()) * self.l3.weight.sum()


def test_a_weight_that_is_used_twice_is_left_as_it_is(made: list[PartGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BORDERS, Twice, {2: ("l2",)})
    gradients(Twice, "zero-bubble", 2)
    assert not made


class _Listed(nn.Module):
    """Its outputs are a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(x),)


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
    [
        ("zero-bubble", {"parameters of": 0}),
        ("1f1b", {"recompute": "boundaries"}),
        ("1f1b", {"batchnorm": "mini-batch"}),
    ],
)
def test_what_happens_between_operators_is_left_as_it_is(
    made: list[PartGraph], monkeypatch: pytest.MonkeyPatch, schedule: str, options: dict[str, Any]
) -> None:
    most = options.pop("parameters of", stage_graph.MOST_SPLIT_BYTES)
    monkeypatch.setattr(stage, "MOST_SPLIT_BYTES", most)
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
    values, parameters, _ = graph.gradients(kept, upstream)
    expected = torch.autograd.grad(module(value), [value, module.weight], upstream)
    for found, gradient in zip([*values, *parameters], expected, strict=True):
        assert torch.equal(found, gradient)
    assert parameters[0].is_contiguous()
    assert [output.shape for output in outputs] == [(4, 5), (3, 5)]
