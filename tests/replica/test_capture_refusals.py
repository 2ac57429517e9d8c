"""What can't be captured, or captures wrongly, is refused by name; what a graph takes for granted is looked at."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.replica.capture import export
from paceline.replica.capture.capture import capture, check
from paceline.replica.module_utils import tensors_of


class Model(nn.Module):
    """One layer and whatever is done with it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def model(body: Callable[..., Any]) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Model(body)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Round(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounds(self: Model, value: Tensor) -> Tensor:
    return Round.apply(self.layer(value))


def assigns(self: Model, value: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
    return self.layer(value)


def counts(self: Model, value: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(value) * self.calls


def branches(self: Model, value: Tensor) -> Tensor:
    hidden = self.layer(value)
    return hidden if hidden.sum() > 0 else -hidden


def views(self: Model, value: Tensor) -> Tensor:
    return self.layer(value.view(len(value), -1))


def loops(self: Model, value: Tensor) -> Tensor:
    return torch.stack([self.layer(row) for row in value])


def fails(self: Model, value: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


def test_an_own_function_that_loses_its_backward_is_named_with_its_parameter() -> None:
    line = inspect.getsourcelines(Round)[1]
    named = (
        rf"the gradient of parameter 'layer.weight' .* calls Round \(.*{Path(__file__).name}:{line}\), .*nn.Sequential"
    )
    with pytest.raises(InputError, match=named):
        capture(model(rounds), numbers(6, 4))


def test_an_own_function_runs_in_a_sequential() -> None:
    module = nn.Sequential(model(rounds), nn.Tanh())
    value = numbers(6, 4)
    captured = capture(module, value)
    found = torch.autograd.grad(captured.module(value)[0].sum(), module[0].layer.weight)
    assert torch.equal(found[0], torch.autograd.grad(module(value).sum(), module[0].layer.weight)[0])
    assert found[0].count_nonzero() == 16


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (assigns, r"buffer 'mean' differs by up to .*; a graph keeps what forward writes .*self.b.copy_"),
        (counts, r"with 3 samples output 0 differs .* what it left in an attribute"),
        (fails, r"itself fails in training on the batch that it is given|stopped at .*: RuntimeError: no such thing"),
    ],
)
def test_a_graph_that_does_something_else_is_refused_by_name(body: Callable[..., Any], named: str) -> None:
    module = model(body)
    with pytest.raises(InputError, match=named):
        capture(module, numbers(6, 4))
    assert module.calls == 0
    assert not module.mean.any()


def test_a_hook_on_backward_is_found() -> None:
    module = model(lambda self, value: self.layer(value).sin())
    module.layer.register_full_backward_hook(lambda layer, given, taken: (2 * given[0],))
    with pytest.raises(InputError, match=r"the gradient of input differs by up to .* a hook on backward"):
        capture(module, numbers(6, 4))


def test_a_branch_on_values_is_refused_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    line = inspect.getsourcelines(branches)[1] + 2
    named = (
        rf"Model can't be captured .* stopped at .*{Path(__file__).name}:{line}, `return hidden if .*`: .*nn.Sequential"
    )
    with pytest.raises(InputError, match=named):
        capture(model(branches), numbers(6, 4))
    assert capfd.readouterr() == ("", "")


def test_a_layer_of_torch_that_asks_for_values_is_named() -> None:
    made = model(lambda self, x: self.norm(self.layer(x)))
    made.norm = nn.Sequential(nn.BatchNorm1d(4, momentum=None)).double()
    match = r"in norm\.0, a BatchNorm1d\(4, .*momentum=None.*float\(self\.num_batches_tracked\).*; write momentum=0\.1"
    with pytest.raises(InputError, match=match):
        capture(made, numbers(5, 4), operators=True)


def test_a_function_of_torch_that_asks_for_values_is_named() -> None:
    made = model(lambda self, x: nn.functional.gaussian_nll_loss(self.layer(x), x, x.exp(), reduction="none"))
    with pytest.raises(InputError, match=r"\(in torch's gaussian_nll_loss, `.*torch\.any\(var < 0\).*`\)"):
        capture(made, numbers(5, 4))


def test_a_number_of_samples_that_the_model_fixes_is_refused() -> None:
    line = inspect.getsourcelines(views)[1] + 1
    with pytest.raises(InputError, match=rf"holds for 6 alone: .*{Path(__file__).name}:{line}, .*number of samples"):
        capture(model(views), numbers(6, 4))
    with pytest.raises(InputError, match=r"holds for 6 alone, and that is the number of samples.* write x.shape"):
        capture(model(loops), numbers(6, 4))


def test_an_output_without_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="Model returns 3, in which there is no tensor"):
        capture(model(lambda self, value: 3), numbers(6, 4))


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(InputError, match="give a batch of at least one sample"):
        capture(model(rounds), numbers(0, 4))


def test_names_that_a_graph_has_for_itself_are_refused() -> None:
    module = model(lambda self, value: self.graph(value))
    module.graph = nn.Linear(4, 4, dtype=torch.float64)
    with pytest.raises(InputError, match=r"Model.graph can't be captured: .* write another name, self.graph_"):
        capture(module, numbers(6, 4))


def sums(self: Model, x: Tensor, y: Tensor, scale: int = 1) -> Tensor:
    return self.layer(x + y) * scale


def halves(self: Model, x: Tensor) -> Tensor:
    return self.layer(x if x.shape[1] % 2 == 0 else 2 * x)


def single(self: Model, x: Tensor) -> Tensor:
    return self.layer(x if x.shape[0] > 1 else 2 * x)


@pytest.mark.parametrize(
    ("body", "inputs", "refused", "named"),
    [
        (sums, (numbers(6, 5, 4),) * 2, (numbers(6, 7, 4), numbers(6, 5, 4)), r"dim 1 of input\[1\] is 5 and dim 1 of"),
        (
            sums,
            (numbers(6, 5, 4),) * 2,
            (numbers(6, 5, 4),),
            r"input is \(a tensor,\), where .* \(a tensor, a tensor\)",
        ),
        (
            sums,
            {"x": numbers(6, 4), "y": numbers(6, 4), "scale": 2},
            {"x": numbers(6, 4), "y": numbers(6, 4), "scale": 3},
            r"input\['scale'\] is 3, where the model was captured with 2",
        ),
        (
            sums,
            {"x": numbers(6, 4), "y": numbers(6, 4)},
            {"x": numbers(6, 4), "z": numbers(6, 4)},
            r"input is \['x', 'z'\], where the model was captured with \['x', 'y'\]",
        ),
        (
            halves,
            numbers(6, 5, 4),
            numbers(6, 8, 4),
            r"`return self.layer.*`, decides by sizes, .* = dim 1 of input, which is 8",
        ),
        (halves, numbers(6, 5, 4), numbers(6, 5, 3), r"dim 2 of input is 3, but the model's graph holds for 4 alone"),
        (halves, numbers(6, 5, 4), numbers(6, 4), r"input has 2 dims, \(6, 4\), but the model was captured with 3"),
        (
            halves,
            numbers(6, 5, 4),
            numbers(6, 5, 4).float(),
            r"is of torch.float32, .* write input.to\(torch.float64\)",
        ),
        (single, numbers(6, 4), numbers(1, 4), r"a batch of 1 samples: the model does something else"),
    ],
)
def test_inputs_that_break_what_is_fixed_are_refused(
    body: Callable[..., Any], inputs: Any, refused: Any, named: str
) -> None:
    captured = capture(model(body), inputs)
    captured.flatten(inputs)
    with pytest.raises(InputError, match=named):
        captured.flatten(refused)


def test_sizes_that_cannot_be_left_open_are_said_where_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export takes them all for every model here, so it is made to refuse more than the number of samples."""

    def refusing(module: nn.Module, args: Any, *, dynamic_shapes: Any, strict: bool) -> Any:
        if any(dim is torch.export.Dim.AUTO for leaf in dynamic_shapes["given"] for dim in leaf[1:]):
            raise RuntimeError("too many open sizes")
        return torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=strict)

    monkeypatch.setattr(export, "export", refusing)
    captured = capture(model(halves), numbers(6, 8, 4))
    captured.flatten(numbers(3, 8, 4))
    with pytest.raises(
        InputError, match="dim 1 of input is 6, but the model's graph holds for 8 alone; pad the inputs to 8"
    ):
        captured.flatten(numbers(3, 6, 4))


def test_parameters_may_be_frozen_or_unused() -> None:
    module = model(lambda self, value: self.layer(value) * self.scale)
    module.scale, module.unused = nn.Parameter(torch.ones(4).double()), nn.Linear(2, 2)
    module.layer.requires_grad_(False)
    captured = capture(module, numbers(6, 4))
    assert {n for n, _ in captured.module.named_parameters()} == {"layer.weight", "layer.bias", "scale"}
    assert [n for n, p in captured.module.named_parameters() if p.requires_grad] == ["scale"]


def test_a_decision_by_the_number_of_samples_is_refused() -> None:
    module = model(lambda self, value: self.layer(value if value.shape[0] > 4 else 2 * value))
    with pytest.raises(
        InputError, match=r"decides by sizes, .* > 4 holds, with s\d+ = dim 0 of input, which is 2 here"
    ):
        capture(module, numbers(6, 4))


def test_leaves_follow_the_captured_order_of_keys() -> None:
    x, y = numbers(6, 4), numbers(6, 4) + 1
    captured = capture(model(lambda self, x, y: self.layer(x) - y), {"x": x, "y": y})
    assert [id(leaf) for leaf in captured.flatten({"y": y, "x": x})] == [id(x), id(y)]


@dataclass
class Output:
    first: Any
    rest: dict[str, Any]
    number: int = 0


def everything(self: Model, value: Tensor) -> Output:
    return Output(self.layer.weight, {"input": value, "more": (self.layer(value), None, "text"), "mean": self.mean}, 7)


def test_outputs_may_be_inputs_parameters_and_no_tensors() -> None:
    module, value = model(everything), numbers(6, 4)
    captured = capture(module, value)
    output = captured.rebuild(captured.module(value))
    assert output.first is module.layer.weight
    assert output.rest["input"] is value
    assert output.rest["mean"] is module.mean
    assert torch.equal(output.rest["more"][0], module.layer(value))
    assert (output.rest["more"][1:], output.number) == ((None, "text"), 7)


def blocks(self: Model, value: Tensor) -> Tensor:
    hidden = self.layer(value)
    with torch.no_grad():
        self.mean.lerp_(hidden.mean(0), 0.1)
        scale = hidden.square().mean().sqrt().to(torch.float64)
    with torch.autocast("cpu", enabled=False):
        return hidden / scale.clamp(min=torch.tensor(0.5, dtype=torch.float64))


def test_blocks_without_gradient_stay_one_call_and_write_buffers() -> None:
    module, value = model(blocks), numbers(6, 4)
    captured = capture(module, value)
    calls = [str(node.target) for node in captured.module.graph.nodes if "wrap_with" in str(node.target)]
    assert calls == ["wrap_with_set_grad_enabled", "wrap_with_autocast"]
    expected, written = module(value), module.mean.clone()
    module.mean.zero_()
    assert torch.equal(captured.module(value)[0], expected)
    assert torch.equal(module.mean, written)


def test_a_check_looks_at_gradients_buffers_and_outputs_of_anything_that_runs() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()

    def cuts_history(value: Tensor) -> Tensor:
        return module[1](module[0](value).detach())

    def counts_twice(value: Tensor) -> Tensor:
        module[1].num_batches_tracked += 1
        return module(value)

    def named() -> dict[str, Tensor]:
        return tensors_of(module)

    check(module, module, named, numbers(6, 4))
    for run, said in (
        (cuts_history, "the gradient of parameter '0.weight' is missing"),
        (counts_twice, "buffer '1.num_batches_tracked' differs in 1 of its 1 elements"),
        (lambda value: module(value) + 1e-12, "output 0 differs by up to 1e-12"),
        (lambda value: module(value) * torch.nan, "output 0 differs by up to nan"),
        (lambda value: (module(value), value), "there are 2 output tensors where the model has 1"),
        (
            lambda value: module(value).float(),
            r"output 0 is \(2, 4\) of torch.float32 instead of \(2, 4\) of torch.float64",
        ),
    ):
        with pytest.raises(InputError, match=f"the rewrite of Sequential does not do .* with 2 samples {said}"):
            check(module, run, named, numbers(6, 4), description="rewrite")
    with pytest.raises(InputError, match=r"the graph of Sequential fails on 2 samples, .*: ZeroDivisionError"):
        check(module, lambda value: 1 / 0, named, numbers(6, 4))
    assert int(module[1].num_batches_tracked) == 0


def test_a_check_takes_parameters_that_are_gathered() -> None:
    """As a rewrite into shards gives them: whole tensors that its run takes apart."""
    module = nn.Linear(4, 6, dtype=torch.float64)
    whole: dict[str, Tensor] = {}

    def gathered() -> dict[str, Tensor]:
        whole.update((name, p.detach().clone().requires_grad_()) for name, p in module.named_parameters())
        return dict(whole)

    def sharded(value: Tensor, factor: float = 1.0) -> Tensor:
        shards = zip(whole["weight"].chunk(2), whole["bias"].chunk(2), strict=True)
        return torch.cat([nn.functional.linear(value, w, factor * b + (1 - factor) * b.detach()) for w, b in shards], 1)

    check(module, sharded, gathered, numbers(5, 4), ulps=64)  # half the rows at a time may go through another kernel
    with pytest.raises(InputError, match="the gradient of parameter 'bias' differs by up to"):
        check(module, lambda value: sharded(value, 0.5), gathered, numbers(5, 4), ulps=64)
