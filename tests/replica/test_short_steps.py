"""Short steps of pure models are graphs from some time on: the bits are those of steps as they are."""

import ctypes
import gc
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import Run, train
from paceline.callbacks import Callback
from paceline.core.errors import InputError, WorkerError
from paceline.engine.distributed import rank_shard
from paceline.replica import short_steps
from paceline.replica.short_steps import ShortStepGraphs
from paceline.replica.step_graph import StepGraph, StepGraphs
from tests.engine import programs
from tests.replica import pure_models


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[StepGraph]:
    """The graphs of the steps that had one: as soon as a step was made without, however long that took."""
    found: list[StepGraph] = []
    run = StepGraph.run

    def counted(self: StepGraph, *words: Any) -> Any:
        found.append(self)
        return run(self, *words)

    monkeypatch.setattr(StepGraph, "run", counted)
    monkeypatch.setattr(rank_shard, "WARM_S", 0.0)
    monkeypatch.setattr(short_steps, "SHORT_STEP_NS", 10**18)
    return found


def trained(words: str = "", *, steps: int = 14, **fields: Any) -> Run:
    options = {name: fields.pop(name) for name in ("callbacks", "loop") if name in fields}
    program = programs.program(**fields)
    return train(program, f"replicas=1{words}", engine="distributed", steps=steps, progress=False, **options)


def same(one: Run, other: Run) -> bool:
    """Whether two runs have ended with the same bits."""
    states = [run.model.state_dict() for run in (one, other) if run.model is not None]
    return all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers": ("", {}),
    "accumulated": (" accumulate=3", {"model": programs.dropout}),
    "own steps": (" aggregation=local-steps:period=3", {"model": programs.dropout}),
    "batchnorm": ("", {"model": programs.batchnorm}),
    "convolution": ("", {"model": programs.convolution}),
    "tied": (" accumulate=2", {"model": programs.Tied}),
    "frozen": ("", {"model": programs.frozen}),
    "two inputs": ("", {"model": programs.Two, "train": programs.with_dict()}),
    "bfloat16": ("", {"precision": "bf16"}),
    **{name: ("", {"model": model, "loss": loss}) for name, (model, loss) in pure_models.CASES.items()},
}


@pytest.mark.parametrize(("words", "fields"), FORMS.values(), ids=list(FORMS))
def test_graphs_have_the_bits_of_steps_as_they_are(
    words: str, fields: dict[str, Any], runs: list[StepGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = trained(words, **fields)
    assert any(each.steps > 1 for each in runs)
    assert all(each.compared == min(2, each.steps) for each in runs)
    made = len(runs)
    monkeypatch.setattr(ShortStepGraphs, "of", lambda *_: None)
    assert same(trained(words, **fields), graph)
    assert len(runs) == made


class Counting(nn.Sequential):
    """A model that does more than return something."""

    def __init__(self) -> None:
        super().__init__(*programs.mlp().children())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def test_what_is_not_pure_stays_as_it_is(runs: list[StepGraph]) -> None:
    trained(model=Counting)
    assert not runs


SCALE = 1.0


class Scaled(nn.Module):
    """A model that reads a global number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = programs.mlp()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * SCALE


def scales(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Batches of four, from the seventh to the ninth of which the model has another scale."""
    global SCALE
    inputs, targets = programs.data()
    for number in itertools.count():
        SCALE = 2.0 if 6 <= number < 9 else 1.0
        yield inputs[number : number + 4], targets[number : number + 4]


def test_a_global_number_that_changes(runs: list[StepGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trained(model=Scaled, train=scales)
    assert runs[-1].steps == 14 - 1 - 3
    monkeypatch.setattr(ShortStepGraphs, "of", lambda *_: None)
    assert same(trained(model=Scaled, train=scales), graph)


def test_nobody_looks_at_the_model(runs: list[StepGraph]) -> None:
    trained(callbacks=[Callback()])
    trained(loop=lambda worker: [worker.step(batch) for batch in worker.batches()])
    assert not runs


def test_long_steps_stay_as_they_are(runs: list[StepGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_steps, "SHORT_STEP_NS", 0)
    trained()
    assert not runs


def test_a_model_that_can_not_be_traced_stays_as_it_is(runs: list[StepGraph]) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = programs.mlp()

        def forward(self, x: Tensor) -> Any:
            x = self.layers(x)
            return x if x.sum() > 0 else -x

    trained(model=Deciding)
    assert not runs


class Remembering(nn.Module):
    """A model with a value of the first batch that is traced, which reads it behind PyTorch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = programs.mlp()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * ctypes.c_double.from_address(x.untyped_storage().data_ptr()).value


def test_a_constant_of_the_first_batch_is_found_on_the_second(
    runs: list[StepGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"graph of .* does not do what the model does"):
        trained(" compile=graph", model=Remembering)
    assert max(each.steps for each in runs) == 1
    monkeypatch.setattr(short_steps, "pure", lambda *_: [])
    plain = trained(model=Remembering)
    monkeypatch.setattr(ShortStepGraphs, "of", lambda *_: None)
    # The one step that was a graph's was of the batch that it was traced on.
    assert same(trained(model=Remembering), plain)


def batches(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Batches of four, of which the ninth has a class that the model does not know."""
    inputs, targets = programs.data()
    for number in itertools.count():
        yield inputs[:4], targets[:4] + 7 * (number == 8)


def test_an_error_is_the_models_own(runs: list[StepGraph]) -> None:
    with pytest.raises(Exception, match="is out of bounds") as caught:
        trained(train=batches)
    assert runs
    with pytest.raises(IndexError) as its:
        cross_entropy(torch.zeros(4, 3), torch.tensor([9, 9, 9, 9]))
    assert isinstance(caught.value, type(its.value)) or isinstance(caught.value.__cause__, type(its.value))


def until_a_graph(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Batches until a step of this process was a graph's."""
    inputs, targets = programs.data()
    for number in itertools.count():
        if number % 100 == 99 and any(isinstance(each, StepGraph) and each.steps for each in gc.get_objects()):
            raise ArithmeticError("a step was a graph's")
        yield inputs[:4], targets[:4]


@pytest.mark.parametrize("model", [programs.mlp, Counting])
def test_workers_have_graphs_of_what_is_pure(model: Any) -> None:
    program, steps = programs.program(model=model, train=until_a_graph), 10**6 if model is programs.mlp else 1500
    with pytest.raises(WorkerError, match="a step was a graph's") if model is programs.mlp else nullcontext():
        train(program, "replicas=1", engine="local", steps=steps, progress=False)


def test_only_on_the_cpu() -> None:
    program = programs.program()
    assert ShortStepGraphs.of(program, program.build(), torch.device("meta"), 0.0) is None
    assert isinstance(ShortStepGraphs.of(program, program.build(), torch.device("cpu"), 0.0), StepGraphs)
