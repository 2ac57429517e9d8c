"""Compiled replicas compute what plain ones do, and a compiler that errs is caught before anything is trained.

Inductor itself compiles in tests/engine/test_compiled.py; here other backends of torch.compile stand in for it.
"""

import builtins
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline import Program, Run, launch, train
from paceline.core.errors import InputError, WorkerError
from paceline.replica import compilation
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, GradientSink
from paceline.replica.capture.capture import capture
from paceline.replica.capture.input_spec import shapes_of
from paceline.replica.compilation import CompiledLoss, CompiledPart
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.single import Single
from tests.engine import programs

Function = Callable[..., Any]
Backend = Callable[[GraphModule, list[Tensor]], Function]
Use = Callable[[str | Backend], None]

COMPILE = torch.compile


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Choose the backend, which is ``aot_eager`` at first: graphs of forward and backward, run as they are."""

    def choose(backend: str | Backend) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, options: COMPILE(function, backend=backend))

    choose("aot_eager")
    yield choose
    torch.compiler.reset()  # type: ignore[no-untyped-call]


def trained(program: Program, strategy: str = "replicas=1", steps: int = 14) -> Run:
    """14 batches of 4 are an epoch of 50 samples, of which the last has two, and one more."""
    return train(program, strategy, engine="virtual", steps=steps, progress=False)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "batchnorm": ("replicas=1", {"model": programs.batchnorm}),
    "dropout": ("replicas=2", {"model": programs.dropout}),
    "tied": ("replicas=1 accumulate=2", {"model": programs.Tied}),
    "two inputs": ("replicas=1", {"model": programs.Two, "train": programs.with_dict()}),
    "own steps": ("replicas=2 aggregation=local-steps:period=3", {"model": programs.dropout}),
}


@pytest.mark.parametrize(("strategy", "fields"), FORMS.values(), ids=list(FORMS))
def test_a_compiled_run_is_the_plain_one(strategy: str, fields: dict[str, Any]) -> None:
    program = programs.program(**fields)
    plain, compiled = (trained(program, f"{strategy}{words}") for words in ("", " compile=true"))
    expected, found = plain.model.state_dict(), compiled.model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        # The same operators; AOTAutograd may add the terms of a gradient in another order.
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


def test_a_checkpoint_of_a_plain_run_goes_on_compiled(tmp_path: Any) -> None:
    program, settings = programs.program(model=programs.dropout), {"engine": "virtual", "progress": False}
    whole = train(program, steps=8, **settings)
    train(program, steps=5, checkpoint=tmp_path, **settings)
    on = train(program, "replicas=1 compile=true", steps=8, checkpoint=tmp_path, resume=True, **settings)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(on.model.state_dict()[name], tensor, rtol=1e-12, atol=1e-14)


def erring(change: Callable[[Tensor], Tensor], among: Callable[[Tensor], bool]) -> Backend:
    """A compiler whose code changes each tensor of the result, or of the arguments, that is of this kind."""

    def backend(graph: GraphModule, _: list[Tensor]) -> Function:
        def run(*arguments: Any) -> Any:
            outputs = graph(*arguments)
            for argument in arguments:
                if isinstance(argument, Tensor) and among(argument) and not argument.requires_grad:
                    argument.data.copy_(change(argument))
            return tuple(change(o) if isinstance(o, Tensor) and o.requires_grad else o for o in outputs)

        return run

    return backend


# 1 % off: thousands of times what another order of sums does in float64.
ERRORS = {
    "output 0": erring(lambda loss: loss * 1.01 if loss.requires_grad else loss, lambda _: False),
    "the gradient of parameter '0.weight'": erring(lambda loss: loss + 0.01 * (loss - loss.detach()), lambda _: False),
    "buffer '1.running_mean'": erring(lambda t: t if t.requires_grad else t * 1.01, lambda t: t.shape == (8,)),
}


@pytest.mark.parametrize(("named", "backend"), ERRORS.items(), ids=["output", "gradient", "buffer"])
def test_a_compiler_that_errs_is_caught_and_what_differs_is_named(named: str, backend: Backend, use: Use) -> None:
    use(backend)
    with pytest.raises(InputError, match="write compile=false") as caught:
        trained(programs.program(model=programs.batchnorm), "replicas=1 compile=true", steps=1)
    assert f"{named} differs by up to" in str(caught.value)
    assert "the compiled forward and loss of Sequential" in str(caught.value)


def test_an_error_of_the_compiler_names_what_to_write(use: Use) -> None:
    def fails(graph: GraphModule, _: list[Tensor]) -> Function:
        raise RuntimeError("no kernel for this\nset THIS_AND_THAT")

    use(fails)
    with pytest.raises(InputError) as caught:
        trained(programs.program(), "replicas=1 compile=true", steps=1)
    assert str(caught.value) == (
        "compile=true: torch.compile can't compile the forward and loss of Sequential: RuntimeError: no kernel for "
        "this; write compile=false"
    )


def test_where_nothing_is_compiled_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, options: function)
    with pytest.raises(InputError, match="finds nothing that it can compile in the forward and loss of Sequential"):
        trained(programs.program(), "replicas=1 compile=true", steps=1)


FACTOR = 2.0


class Scaled(nn.Module):
    """Reads a global name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * FACTOR  # type: ignore[no-any-return]


def test_a_model_that_another_process_has_sent_reads_its_own_globals() -> None:
    """As cloudpickle makes it again: its functions' globals name a module, but are not that module's."""

    class Sent(Scaled):
        forward = FunctionType(Scaled.forward.__code__, {"__name__": __name__, "__builtins__": builtins, "FACTOR": 3.0})

    program = programs.program(model=Sent)
    plain, compiled = (trained(program, strategy, 3) for strategy in ("replicas=1", "replicas=1 compile=true"))
    # Forward and its gradient are those of a factor of 3: the same operators on the same numbers.
    torch.testing.assert_close(compiled.model.state_dict(), plain.model.state_dict(), rtol=1e-12, atol=1e-14)


SIZES = (4, 4, 7, 4, 7, 3)


def batch_of(samples: int) -> Batch:
    inputs, targets = programs.data(samples=samples)
    return Batch(inputs, targets, samples)


def own_batches(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Batches of sizes that nobody knows before they come."""
    return ((batch.input, batch.target) for batch in map(batch_of, SIZES))


def wrong_for(samples: int) -> Backend:
    """A compiler whose code is 1 % off where a tensor has this many rows; in the gradient as in the value."""

    def backend(graph: GraphModule, _: list[Tensor]) -> Function:
        def run(*arguments: Any) -> Any:
            off = any(isinstance(each, Tensor) and each.dim() > 1 and len(each) == samples for each in arguments)
            return tuple(out * 1.01 if off else out for out in graph(*arguments))

        return run

    return backend


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("words", ["", " accumulate=2", " aggregation=local-steps:period=2"])
def test_sizes_that_come_later_are_compared_and_leave_no_trace(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers and running statistics are those of a run without comparisons."""
    compared = list[int]()
    program = programs.program(model=noisy, train=own_batches)
    plain = trained(program, f"replicas=1{words}", 3)
    check = compilation.check

    def counted(*arguments: Any, **options: Any) -> None:
        compared.append(len(arguments[3][0]))
        check(*arguments, **options)

    monkeypatch.setattr(compilation, "check", counted)
    compiled = trained(program, f"replicas=1{words} compile=true", 3)
    assert compared == sorted(set(compared), key=compared.index), "each size once"
    assert compared[:2] == [4, 7]
    for name, tensor in plain.model.state_dict().items():
        # The same operators; AOTAutograd may add the terms of a gradient in another order.
        torch.testing.assert_close(compiled.model.state_dict()[name], tensor, rtol=1e-12, atol=1e-14)


def test_a_size_for_which_the_compiler_errs_is_caught_when_it_comes(use: Use) -> None:
    use(wrong_for(7))
    program = programs.program(train=own_batches)
    trained(program, "replicas=1 compile=true", 2)
    with pytest.raises(InputError, match=r"with 7 samples output 0 differs by up to .* write compile=false"):
        trained(program, "replicas=1 compile=true", 3)


def test_what_the_model_raises_at_a_new_size_is_its_own() -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)
            worker.step(Batch(batch.input[:, :5], batch.target, batch.samples))

    with pytest.raises(WorkerError, match="RuntimeError: mat1 and mat2 shapes cannot be multiplied"):
        launch(loop, programs.program(), "replicas=1 compile=true", engine="virtual", steps=2, progress=False)


class Taken(GradientSink):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.gradients = dict[int, Tensor]()

    def is_last_micro_step(self) -> bool:
        return True

    def ready(self, index: int, gradient: Tensor, samples: int) -> None:
        assert index not in self.gradients
        self.gradients[index] = gradient.clone()


def test_gradients_of_a_comparison_are_sent_to_nobody() -> None:
    """Where each gradient is sent as it becomes final, those of a comparison come from the same parameters."""
    program = programs.program(model=programs.dropout)
    sent: dict[bool, list[dict[int, Tensor]]] = {True: [], False: []}
    for compiles, deltas in sent.items():
        module = program.build()
        layout = FlatLayout.of(module)
        state, out = read(module, layout.new()), layout.new()
        autograd = Autograd(program, module, layout, 0, "cpu")
        if compiles:
            autograd.compiled = autograd.checked(CompiledLoss, batch_of(4), [4])
        replica, sink = Single(autograd), Taken()
        with replica.sending_gradients(sink):
            for clock, samples in enumerate(SIZES):
                sink.gradients = {}
                replica.adopt(state)
                replica.advance(batch_of(samples), clock)
                replica.finish(out)
                deltas.append(sink.gradients)
    for found, expected in zip(sent[True], sent[False], strict=True):
        assert found.keys() == expected.keys()
        for index, gradient in expected.items():
            torch.testing.assert_close(found[index], gradient, rtol=1e-12, atol=1e-14)


def test_a_captured_part_is_compiled_for_each_size_and_keeps_its_names(use: Use) -> None:
    model = programs.convolution()
    part = capture(model, torch.randn(4, 6, dtype=torch.float64), operators=True).module
    use(wrong_for(5))
    batches = [[torch.randn(size, 6, dtype=torch.float64)] for size in (4, 3, 2, 5)]
    known = {shapes_of(arguments): arguments for arguments in batches[:2]}
    compiled = CompiledPart(part, known)
    for arguments in batches[:3]:
        compiled.check_new(shapes_of(arguments), arguments)
        # The same operators on the same numbers.
        torch.testing.assert_close(compiled.function(*arguments)[0], model(*arguments), rtol=1e-12, atol=1e-14)
    with pytest.raises(InputError, match="with 5 samples output 0 differs"):
        compiled.check_new(shapes_of(batches[3]), batches[3])
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_compiled_stages_have_no_measured_times() -> None:
    with pytest.raises(InputError, match=r"measures stages and shards as they are.*; write times in seconds"):
        train(programs.program(), "stages=2 compile=true", engine="virtual", times="measured", steps=1, progress=False)
