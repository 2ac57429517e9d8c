"""Parts in a chain are the model: outputs, gradients and buffers by name; and nothing goes where it need not."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph

from paceline.core.errors import InputError
from paceline.replica.capture.capture import capture
from paceline.replica.capture.verify import model_runs
from paceline.replica.pipeline.cut import Crossing, Cut, cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.partition import UnitCosts, partition
from paceline.replica.pipeline.prepare import check_cut, run_parts
from tests.replica.pipeline.cut_models import Attention, aten, by_hand, calls, from_zoo, made
from tests.zoo import ZOO


def evenly(units: Units, parts: int) -> tuple[int, ...]:
    return partition(UnitCosts([1.0] * len(units.groups)), parts, candidates=units.candidates)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_chained_are_the_model(name: str, parts: int) -> None:
    job, model, units = from_zoo(name)
    check_cut(cut(units, evenly(units, parts)), model, job.inputs)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["unet", "masked", "tied", "mlp", "inception"]), st.data())
def test_wherever_they_are_cut(name: str, data: st.DataObject) -> None:
    job, model, units = from_zoo(name)
    boundaries = data.draw(st.sets(st.integers(1, len(units.groups) - 1)))
    check_cut(cut(units, sorted(boundaries)), model, job.inputs, samples=(2,))


def in_another_order(dtype: torch.dtype, *, training: bool) -> tuple[nn.Module, Tensor, Units]:
    """A model whose values have their dims in memory in another order, captured."""
    torch.manual_seed(1)
    model, inputs = Attention().to(dtype), torch.randn(4, 2, 6, 6, dtype=dtype)
    return model, inputs, group(capture(model, inputs, training=training, others=(), verified=False))


def test_a_value_keeps_its_order_in_memory_wherever_it_is_cut() -> None:
    model, inputs, units = in_another_order(torch.float32, training=True)
    runs = model_runs(model, inputs, (2,))
    for boundary in units.candidates:
        check_cut(cut(units, [boundary]), model, inputs, runs=runs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_so_it_does_in_any_precision_and_mode(dtype: torch.dtype, training: bool) -> None:
    model, inputs, units = in_another_order(dtype, training=training)
    check_cut(cut(units, units.candidates), model, inputs, samples=(2,))


def test_training_steps_are_the_models() -> None:
    """Not on a few samples and by another hand: loss, gradients and batch norm's statistics, bit for bit."""
    job, model, units = from_zoo("resnet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts = cut(units, evenly(units, 3))

    def step(run: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        model.load_state_dict(before)
        model.zero_grad()
        torch.manual_seed(5)
        loss = job.loss(run(), job.targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), gradients, {name: b.clone() for name, b in model.named_buffers()}

    captured = units.captured
    expected = step(lambda: model(**job.inputs))

    def run() -> Any:
        *_, last = run_parts(parts, captured.flatten(job.inputs))
        return captured.rebuild(last.outputs[len(last.part.sent) :])

    found = step(run)
    model.load_state_dict(before)
    model.zero_grad()
    assert torch.equal(expected[0], found[0])
    # No value of a ResNet has more than two consumers, and the sum of two gradients is the same either way round.
    for one, other in itertools.pairwise((expected, found)):
        for named, same in ((one[1], other[1]), (one[2], other[2])):
            assert named.keys() == same.keys()
            assert all(torch.equal(named[name], same[name]) for name in named)


def wrongly_cut(name: str, parts: int) -> tuple[Any, nn.Module, Cut]:
    job = ZOO[name]()
    model = job.model()
    units = group(capture(model, job.inputs))
    return job, model, cut(units, evenly(units, parts))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_part_that_computes_something_else_is_noticed(number: int) -> None:
    job, model, parts = wrongly_cut("unet", 3)
    graph = parts.parts[number].module.graph
    node = next(node for node in graph.nodes if node.target is aten.conv2d.default)
    with graph.inserting_after(node):
        more = graph.call_function(aten.mul.Tensor, (node, 1.0 + 1e-9))
        node.replace_all_uses_with(more, lambda user: user is not more)
    parts.parts[number].module.recompile()
    with pytest.raises(InputError, match=r"the cut into 3 parts of UNet does not do what the model does"):
        check_cut(parts, model, job.inputs)


def test_a_gradient_that_does_not_come_back_is_noticed() -> None:
    job, model, parts = wrongly_cut("unet", 2)
    graph = parts.parts[1].module.graph
    skip = next(node for node in graph.nodes if node.name == parts.parts[1].received[0].name)
    with graph.inserting_after(skip):
        stopped = graph.call_function(aten.detach.default, (skip,))
        skip.replace_all_uses_with(stopped, lambda user: user is not stopped)
    parts.parts[1].module.recompile()
    with pytest.raises(InputError, match=r"parameter 'down.0"):
        check_cut(parts, model, job.inputs)


@pytest.mark.parametrize("name", ZOO)
def test_parts_hold_the_models_own_tensors_and_no_others(name: str) -> None:
    _, model, units = from_zoo(name)
    parts = cut(units, evenly(units, min(4, len(units.groups))))
    own = dict(model.named_parameters())
    held: dict[str, list[int]] = {}
    for part in parts.parts:
        used = {str(node.target) for node in part.module.graph.nodes if node.op in ("get_attr", "call_module")}
        for key, parameter in part.module.named_parameters():
            assert parameter is own[key]
            assert key in used or key.rpartition(".")[0] in used
            held.setdefault(key, []).append(part.number)
        for key, buffer in part.module.named_buffers():
            assert buffer is dict(units.captured.module.named_buffers())[key]
    assert held.keys() == own.keys()
    assert {key: tuple(where) for key, where in held.items() if len(where) > 1} == parts.tied
    assert ("embedding.weight" in parts.tied) == (name == "tied")


@pytest.mark.parametrize("name", ZOO)
def test_what_crosses_goes_straight_and_inputs_never(name: str) -> None:
    _, _, units = from_zoo(name)
    parts = cut(units, evenly(units, min(4, len(units.groups)))).parts
    leaves = {node.name for node in units.captured.module.graph.nodes if node.op == "placeholder"}
    for part in parts:
        for crossing in part.received:
            assert crossing.name not in leaves
            assert crossing.source < part.number
            assert part.number in crossing.consumers
            assert crossing in parts[crossing.source].sent
        for crossing in part.sent:
            assert crossing.source == part.number
            assert all(crossing in parts[consumer].received for consumer in crossing.consumers)
        takes = [node.name for node in part.module.graph.nodes if node.op == "placeholder"]
        assert takes[len(part.inputs) :] == [crossing.name for crossing in part.received]
        for node in part.module.graph.nodes:
            assert node.op == "output" or node.users or not takes.count(node.name), "taken in vain"


def sent(parts: Cut) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(c.name, c.source, c.consumers) for part in parts.parts for c in part.sent]


def test_a_skip_passes_no_part_between() -> None:
    _, _, units = from_zoo("unet")
    nodes = units.nodes()
    parts = cut(units, [nodes["conv2d_1"], nodes["conv2d_2"], nodes["cat_1"]])
    assert sent(parts) == [
        ("relu", 0, (3,)),
        ("max_pool2d", 0, (1,)),
        ("relu_1", 1, (2,)),
        ("max_pool2d_1", 1, (2,)),
        ("upsample_nearest2d_1", 2, (3,)),
    ]


def test_masks_are_made_where_they_are_needed() -> None:
    _, _, units = from_zoo("masked")
    layers = units.modules()
    parts = cut(units, [layers["layers.1"], layers["layers.2"]]).parts
    assert [part.inputs for part in parts] == [(0, 1), (0,), (0,)]
    assert all("bitwise_not" in " ".join(n.name for n in part.module.graph.nodes) for part in parts)
    assert [[c.name for c in part.received] for part in parts] == [[], ["add"], ["add_1"]]


def test_outputs_made_early_and_inputs_that_are_outputs_reach_the_last_part() -> None:
    def build(graph: Graph) -> Any:
        y = graph.placeholder("y")
        early = made(graph)
        late = calls(graph, aten.exp, calls(graph, aten.cos, early))
        return late, early, y, calls(graph, aten.neg, y)

    parts = cut(group(by_hand({}, build, inputs=2)), [1, 2]).parts
    assert sent(Cut(None, parts, {})) == [("mm", 0, (1, 2)), ("cos", 1, (2,))]  # type: ignore[arg-type]
    assert [part.inputs for part in parts] == [(1,), (), (0,)]
    x, y = torch.randn(3, 3), torch.randn(3)
    first = parts[0].module(x)[0]
    assert all(map(torch.equal, parts[2].module(y, first, first.cos()), (first.cos().exp(), first, y, -y)))


def sizes(graph: Graph) -> Any:
    """The size of what sin makes is needed by the last, which does not need that itself."""
    value = made(graph, "x", "y")
    rows = calls(graph, aten.sym_size.int, value, 0)
    own = calls(graph, aten.sym_size.int, value.args[1], 1)
    second = calls(graph, aten.add.Tensor, calls(graph, aten.exp, value), rows)
    both = graph.call_function(torch.sym_max, (rows, own))
    third = calls(graph, aten.sin, second)
    return calls(graph, aten.mul.Tensor, third, both)


def run(parts: Cut, leaves: Sequence[Tensor]) -> list[Any]:
    values: dict[str, Any] = {}
    for part in parts.parts:
        results = part.module(*(leaves[i] for i in part.inputs), *(values[c.name] for c in part.received))
        values |= {c.name: value for c, value in zip(part.sent, results, strict=False)}
    return list(results[len(part.sent) :])


def test_sizes_are_taken_where_the_tensor_is_and_sent_where_it_is_not() -> None:
    units = group(by_hand({}, sizes, inputs=2))
    assert {node.name for node in units.sizes} == {"sym_size", "sym_max"}
    assert [nodes[0].name for nodes in units.groups] == ["mm", "exp", "add", "sin", "mul"]
    parts = cut(units, [1, 4])
    assert sent(parts) == [("mm", 0, (1,)), ("sym_max", 0, (2,)), ("sin", 1, (2,))]
    assert [part.inputs for part in parts.parts] == [(0, 1), (), ()]
    x, y = torch.randn(3, 2), torch.randn(2, 5)
    assert torch.equal(run(parts, [x, y])[0], ((x @ y).exp() + 3).sin() * 5)


@given(st.sets(st.integers(1, 4)))
def test_sizes_are_right_wherever_it_is_cut(boundaries: set[int]) -> None:
    units = group(by_hand({}, sizes, inputs=2))
    x, y = torch.randn(3, 2), torch.randn(2, 5)
    assert torch.equal(run(cut(units, sorted(boundaries)), [x, y])[0], ((x @ y).exp() + 3).sin() * 5)


def test_numbers_cross() -> None:
    def build(graph: Graph) -> Any:
        value = made(graph)
        number = calls(graph, aten.item, calls(graph, aten.sum, value))
        twice = graph.call_function(operator.mul, (number, 2))
        later = calls(graph, aten.sin, calls(graph, aten.cos, value))
        return calls(graph, aten.mul.Tensor, later, number), twice

    units = group(by_hand({}, build))
    parts = cut(units, [3, 4])
    assert sent(parts) == [("mm", 0, (1,)), ("item", 0, (2,)), ("cos", 1, (2,))]
    x = torch.randn(3, 3)
    total = (x @ x).sum().item()
    found = run(parts, [x])
    assert torch.equal(found[0], (x @ x).cos().sin() * total)
    assert found[1] == total * 2


class Block(nn.Module):
    """Writes its input before it does anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.act(x))


def test_what_is_received_may_be_written() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Block(), nn.Flatten(), Block()).double(), torch.randn(3, 4).double()
    for boundaries in ([1], [2], [3], [1, 2, 3]):
        units = group(capture(model, x))
        check_cut(cut(units, boundaries), model, x)


class Averaging(nn.Module):
    """Keeps an average under no_grad, which is read further on, and a norm under another autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        value = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(value.mean(0) * 0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            value = self.norm(value)
        return self.last((value - self.average).tanh())


def test_blocks_are_cut_apart_and_buffers_are_sent_as_copies() -> None:
    model, x = Averaging().double(), torch.randn(3, 4).double()
    units = group(capture(model, x))
    assert len(units.groups) >= 5
    for boundary in range(1, len(units.groups)):
        parts = cut(units, [boundary])
        check_cut(parts, model, x)
        own = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        given = [x] if parts.parts[0].inputs else []
        assert not own & {value.untyped_storage().data_ptr() for value in parts.parts[0].module(*given)}


def test_a_module_that_writes_unannounced_is_noticed() -> None:
    class Sly(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.relu_())

    model, x = nn.Sequential(nn.Linear(4, 4), Sly(4, 4)).double(), torch.randn(3, 4).double()
    with pytest.raises(InputError, match=r"stage 1 writes .* in place; write inplace=False"):
        check_cut(cut(group(capture(model, x)), [1]), model, x)


def test_shared_parameters_of_modules_have_one_name() -> None:
    first, last = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    last[1].weight = first.weight
    model, x = nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), first).double(), torch.randn(3, 4).double()
    units = group(capture(model, x))
    parts = cut(units, [1, 3, 4])
    names = [sorted(name for name, _ in part.module.named_parameters()) for part in parts.parts]
    assert names == [["0.bias", "0.weight"], [], ["0.weight", "2.1.bias"], ["0.bias", "0.weight"]]
    assert set(parts.tied) == {"0.weight", "0.bias"}
    assert parts.tied["0.bias"] == (0, 3)
    check_cut(parts, model, x)


def test_a_crossing_is_one_object_for_all() -> None:
    _, _, units = from_zoo("inception")
    parts = cut(units, [units.nodes()["conv2d_1"], units.nodes()["conv2d_2"]]).parts
    shared = [c for c in parts[0].sent if len(c.consumers) > 1]
    assert shared == [Crossing("relu", 0, (1, 2))]
