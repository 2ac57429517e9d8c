"""Steps that run as one list of operators: the bits of plain ones, and refused where they could be something else."""

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from paceline import Program, Run, train
from paceline.core.errors import InputError
from paceline.replica import operator_list, step_graph
from paceline.replica.autograd import Autograd
from paceline.replica.base import EMPTY, Batch
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.single import Single
from paceline.replica.step_graph import StepGraphs, form_of
from tests.engine import programs


def trained(program: Program, strategy: str = "replicas=1", steps: int = 14) -> Run:
    """14 batches of 4 are an epoch of 50 samples, of which the last has two, and one more."""
    # In virtual time plain replicas may be computed at once, which has other bits; alone they are not.
    engine = "distributed" if strategy.startswith("replicas=1") else "virtual"
    return train(program, strategy, engine=engine, steps=steps, progress=False)


def autograd_of(program: Program) -> Autograd:
    """The gradients of a program's model, whose steps are graphs."""
    module = program.build()
    layout = FlatLayout.of(module)
    autograd = Autograd(program, module, layout, 0, "cpu")
    autograd.graphs = autograd.checked(StepGraphs, batch_of(4), [])
    autograd.bind(read(module, layout.new()))
    return autograd


def batch_of(samples: int) -> Batch:
    return Batch(*programs.data(samples=samples), samples)


SIZES = {"at cache lines": 16, "beside them": 7}


@pytest.mark.parametrize("width", SIZES.values(), ids=list(SIZES))
def test_gradients_are_written_into_the_delta_under_way(width: int) -> None:
    """Of steps by turns into two of them, as they are without a graph; a step that is called off leaves nothing."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()

    program = programs.program(model=model)
    module = program.build()
    layout = FlatLayout.of(module)
    deltas = [layout.new() for _ in range(2)]
    under_way = [deltas[0]]
    autograd, plain = (Autograd(program, program.build(), layout, 0, "cpu") for _ in range(2))
    make = functools.partial(StepGraphs, delta=lambda: under_way[0])
    autograd.graphs = autograd.checked(make, batch_of(4), [])
    replica, other, state = Single(autograd), Single(plain), read(module, layout.new())
    expected = layout.new()
    for step in range(6):
        under_way[0] = out = deltas[step % 2]
        for each in out.parameters:
            each.fill_(torch.nan)
        inputs, targets = programs.data(samples=4 * step + 4)
        batch = Batch(inputs[-4:], targets[-4:], 4)
        replica.adopt(state)
        if step == 3:
            replica.advance(batch_of(4), step)
            replica.adopt(state)
        if step == 4:  # no sample
            batch = EMPTY
        other.adopt(state)
        assert math.isnan(replica.advance(batch, step)) == (step == 4)
        other.advance(batch, step)
        written = autograd.graphs.written
        assert written is None if step == 4 else all(a is b for a, b in zip(written, out.views.parameters, strict=True))
        replica.finish(out)
        other.finish(expected)
        assert all(map(torch.equal, out.parameters, expected.parameters))


def test_a_delta_of_which_the_loss_needs_a_part_is_not_written_by_graphs() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    program = programs.program(model=Unused)
    module = program.build()
    layout = FlatLayout.of(module)
    out = layout.new()
    autograd = Autograd(program, module, layout, 0, "cpu")
    autograd.graphs = autograd.checked(functools.partial(StepGraphs, delta=lambda: out), batch_of(4), [])
    replica = Single(autograd)
    replica.adopt(read(module, layout.new()))
    replica.advance(batch_of(4), 0)
    assert autograd.graphs.written is None
    replica.finish(out)
    found = dict(out.named())
    assert not found["unused.weight"].any()
    assert found["layer.weight"].any()


class Layers(nn.Module):
    """Two layers, around what a test does between them."""

    def __init__(self, between: Callable[["Layers", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        self.calls, self.kept = 0, torch.zeros(8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    """The square, with a gradient of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2.5 * outputs[0] * x


def write_buffer(model: Layers, x: Tensor) -> Tensor:
    model.seen.add_(x.detach().mean(0))  # type: ignore[operator]
    return torch.relu_(x)


def write_plain(model: Layers, x: Tensor) -> Tensor:
    model.kept.add_(1.0)
    return x * model.kept


def halves(model: Layers, x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left.sin(), right.cos()], dim=-1)[:, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])]


def masked(model: Layers, x: Tensor) -> Tensor:
    return x.masked_fill(x.abs() < 0.1, float("-inf")).softmax(-1)


def hooked(model: Layers, x: Tensor) -> Tensor:
    if x.requires_grad:  # it is scored without
        x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    return x


KEPT: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "a buffer": write_buffer,
    "a tensor that is no buffer": write_plain,
    "parts": halves,
    "infinity": masked,
    "a function's own gradient": lambda _, x: Doubled.apply(x),  # type: ignore[no-untyped-call]
    "a hook on a gradient": hooked,
    "random numbers": lambda _, x: x + torch.randn(8, dtype=x.dtype) * torch.rand(()),
    "numbers": lambda _, x: x * torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(4),
    "what is computed again": lambda _, x: checkpoint(torch.tanh, x, use_reentrant=False),  # type: ignore[no-any-return]
}

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("replicas=1", {"model": lambda between=between: Layers(between)}) for name, between in KEPT.items()},
    "batchnorm": ("replicas=1", {"model": programs.batchnorm}),
    "convolution": ("replicas=1", {"model": programs.convolution}),
    "dropout of two replicas": ("replicas=2 aggregation=asynchronous", {"model": programs.dropout}),
    "accumulated": ("replicas=1 accumulate=3", {"model": programs.dropout}),
    "tied": ("replicas=1 accumulate=2", {"model": programs.Tied}),
    "frozen": ("replicas=1", {"model": programs.frozen}),
    "two inputs": ("replicas=1", {"model": programs.Two, "train": programs.with_dict()}),
    "own steps": ("replicas=2 aggregation=local-steps:period=3", {"model": programs.dropout}),
    "bfloat16": ("replicas=1", {"precision": "bf16"}),
}


@pytest.mark.parametrize(("strategy", "fields"), FORMS.values(), ids=list(FORMS))
def test_a_graphs_run_has_the_bits_of_a_plain_one(strategy: str, fields: dict[str, Any]) -> None:
    program = programs.program(**fields)
    plain, graph = (trained(program, f"{strategy}{words}") for words in ("", " compile=graph"))
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], tensor), name


def test_in_virtual_time_a_model_in_stages_is_traced_whole() -> None:
    words = "replicas=1 stages=2 micro_batches=2 cuts=2"
    runs = [
        train(programs.program(), f"{words}{more}", engine="virtual", steps=3, progress=False)
        for more in ("", " compile=graph")
    ]
    plain, graph = (run.model.state_dict() for run in runs)
    for name, tensor in plain.items():  # micro-batches are computed at once there, or one by one
        torch.testing.assert_close(graph[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = getattr(nn, kind)(3, 5, batch_first=True), nn.Linear(5, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x.view(-1, 2, 3))[0][:, -1])  # type: ignore[no-any-return]

    program = programs.program(model=Recurrent)
    plain, graph = (trained(program, f"replicas=1{words}", 3).model.state_dict() for words in ("", " compile=graph"))
    assert all(torch.equal(tensor, graph[name]) for name, tensor in plain.items())


def count(model: Layers, x: Tensor) -> Tensor:
    model.calls += 1
    return x * model.calls


def keep(model: Layers, x: Tensor) -> Tensor:
    model.kept = x.detach().mean(0)
    return x


def assign(model: Layers, x: Tensor) -> Tensor:
    model.seen = model.seen + 1
    return x


REFUSED: dict[str, tuple[Callable[[Layers, Tensor], Tensor], str]] = {
    "a counter": (count, r"can't be traced: forward changes self\.calls"),
    "a tensor that is kept": (keep, r"can't be traced: forward changes self\.kept"),
    "a buffer that is assigned": (assign, r"buffer 'seen' differs by up to"),
    "Python's random numbers": (lambda _, x: x * random.random(), "can't be traced: forward draws from Python's"),
    "a decision by values": (lambda _, x: x if x.sum() > 0 else -x, r"can't be traced at .*test_step_graph\.py:\d+, "),
    "a shape by values": (
        lambda _, x: x * x[x > 0].mean(),
        r"can't be traced at .*: it asks for the values of a tensor",
    ),
    "a number that is read": (lambda _, x: x * x.sum().item(), r"can't be traced at .*: it asks for the values of a t"),
    "a layer that asks for a value": (
        lambda _, x: nn.BatchNorm1d(x.shape[1], momentum=None, dtype=x.dtype)(x),
        r"\(in BatchNorm1d\(.*momentum=None.*; write momentum=0\.1 there\): it asks for the values of a tensor",
    ),
    "an array": (
        lambda _, x: x * torch.from_numpy(x.detach().mean(0).numpy()),
        r"can't be traced at .*: it asks for the values of a tensor \(numpy\)",
    ),
    "random numbers that are drawn again": (
        lambda _, x: checkpoint(lambda x: torch.dropout(torch.tanh(x), 0.5, True), x, use_reentrant=False),  # type: ignore[no-any-return]
        "the gradient of parameter 'first.weight' differs by up to",
    ),
}


@pytest.mark.parametrize(("between", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_graph_would_lose_is_refused(between: Callable[[Layers, Tensor], Tensor], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        trained(programs.program(model=lambda: Layers(between)), "replicas=1 compile=graph", 1)
    assert "write compile=false" in str(caught.value)


def test_hooks_are_refused_and_named() -> None:
    def model() -> nn.Module:
        made = programs.mlp()
        made[1].register_forward_hook(lambda module, inputs, output: None)  # type: ignore[index]
        return made

    with pytest.raises(InputError, match=r"compile=graph: 1 has a hook, .*<lambda>, which a graph would not call"):
        trained(programs.program(model=model), "replicas=1 compile=graph", 1)

    def watched() -> nn.Module:
        made = programs.mlp()
        next(made.parameters()).register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
        return made

    with pytest.raises(InputError, match=r"compile=graph: the gradient of 0\.weight has a hook, .*<lambda>"):
        trained(programs.program(model=watched), "replicas=1 compile=graph", 1)


class Cache:
    """Something that a batch may have, of which nobody knows what it does."""

    __hash__ = None  # type: ignore[assignment]


def test_a_batch_of_unknown_objects_is_refused() -> None:
    with pytest.raises(InputError, match="a batch has a Cache, of which nobody knows"):
        form_of((torch.ones(2), {"cache": Cache()}))


SIZES = (4, 4, 7, 4, 7, 3)


def own_batches(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Batches of sizes that nobody knows before they come."""
    return ((batch.input, batch.target) for batch in map(batch_of, SIZES))


@pytest.mark.parametrize("most", [16, 1])
@pytest.mark.parametrize("words", ["", " accumulate=2", " aggregation=local-steps:period=2"])
def test_each_size_is_traced_once_as_it_comes(words: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the number of graphs run as they are; comparisons leave no trace in random numbers and buffers."""
    traced = list[int]()
    once = step_graph.StepGraphs._traced

    def counted(self: Any, inputs: Any) -> Any:
        traced.append(len(inputs[0]))
        return once(self, inputs)

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    monkeypatch.setattr(step_graph.StepGraphs, "_traced", counted)
    monkeypatch.setattr(step_graph, "MOST", most)
    program = programs.program(model=noisy, train=own_batches)
    plain = trained(program, f"replicas=1{words}", 3)
    graph = trained(program, f"replicas=1{words} compile=graph", 3)
    assert traced == ([4, 7, 3] if "accumulate" in words else [4, 7])[:most]
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], tensor), name


# An operator -> another one, which takes the same arguments, and what differs then.
PLANTED: dict[str, tuple[Any, Any, str]] = {
    "forward": (torch.ops.aten.relu.default, torch.ops.aten.sigmoid.default, "output 0"),
    "backward": (
        torch.ops.aten.threshold_backward.default,
        torch.ops.aten.hardswish_backward.default,
        "the gradient of parameter '0.weight'",
    ),
}


@pytest.mark.parametrize(("operator", "other", "named"), PLANTED.values(), ids=list(PLANTED))
def test_a_graph_that_errs_is_caught(operator: Any, other: Any, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simplify = operator_list.simplify

    def planted(module: GraphModule) -> None:
        simplify(module)
        (node,) = module.graph.find_nodes(op="call_function", target=operator)
        node.target, node.args = other, node.args[: len(other._schema.arguments)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    monkeypatch.setattr(operator_list, "simplify", planted)
    with pytest.raises(InputError, match="write compile=false") as caught:
        trained(programs.program(model=model), "replicas=1 compile=graph", 1)
    assert "the graph of forward, loss and backward of Sequential does not do what the model does" in str(caught.value)
    assert f"{named} differs by up to" in str(caught.value)


def test_what_an_operator_refuses_is_said_without_the_interpreters_words() -> None:
    autograd = autograd_of(programs.program())
    batch = batch_of(4)
    with pytest.raises(RuntimeError) as caught:
        autograd.backward(batch._replace(target=batch.target + 5), 0)
    assert str(caught.value).startswith("Target ")
    assert "interpreter" not in str(caught.value)


def test_what_the_model_raises_at_a_new_size_is_its_own() -> None:
    autograd = autograd_of(programs.program())
    batch = batch_of(4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        autograd.backward(batch._replace(input=batch.input[:, :5]), 0)


def test_gradients_add_up_by_their_weights() -> None:
    """As those of autograd do: bit by bit."""
    program = programs.program()
    graph, plain = autograd_of(program), autograd_of(program)
    plain.graphs = None
    for clock, (samples, weight) in enumerate([(4, 3.0), (4, 1.0), (7, 0.5)]):
        losses = {each.backward(batch_of(samples), clock, weight) for each in (graph, plain)}
        assert len(losses) == 1
    for found, expected in zip(graph.take_gradients(), plain.take_gradients(), strict=True):
        assert torch.equal(found, expected)
