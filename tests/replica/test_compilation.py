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

from paceline import Program, Run, train
from paceline.core.errors import InputError
from paceline.replica.capture.capture import capture
from paceline.replica.compilation import compile_part
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


def test_a_captured_part_is_compiled_for_each_size_and_keeps_its_names() -> None:
    model = programs.convolution()
    part = capture(model, torch.randn(4, 6, dtype=torch.float64), operators=True).module
    batches = [[torch.randn(size, 6, dtype=torch.float64)] for size in (4, 3)]
    forward = compile_part(part, batches, communicates=False)
    for (x,) in batches:
        # The same operators on the same numbers.
        torch.testing.assert_close(forward(x)[0], model(x), rtol=1e-12, atol=1e-14)
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_compiled_stages_have_no_measured_times() -> None:
    with pytest.raises(InputError, match=r"measures stages and shards as they are.*; write times in seconds"):
        train(programs.program(), "stages=2 compile=true", engine="virtual", times="measured", steps=1, progress=False)
