"""However the data lie, each replica sees the same batches."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from paceline import InputError, Program, Run, WorkerError, train
from tests import oracle
from tests.engine import programs
from tests.engine.programs import Rows

STEPS = 7
ROUNDING = 1e-12
"""Gradients are batched in one call where data are plain tensors, and computed one at a time elsewhere."""


def run(program: Program, strategy: str = "replicas=3 aggregation=asynchronous", **settings: Any) -> Run:
    return train(program, strategy, engine="virtual", progress=False, **({"steps": STEPS} | settings))


class Scaled(TensorDataset):
    """A subclass may change what it returns, so its tensors are not read behind its back."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs * 2, targets


def collate(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return inputs * 2, targets


@pytest.fixture(scope="module")
def plain() -> Run:
    return run(programs.program())


@pytest.fixture(scope="module")
def doubled() -> Run:
    inputs, targets = programs.data()
    return run(programs.program(train=(inputs * 2, targets)))


@pytest.mark.parametrize(
    "fields",
    [
        {"train": TensorDataset(*programs.data())},
        {"train": Rows(programs.data())},
        {"train": [Rows(programs.data())[i] for i in range(programs.SAMPLES)]},
        {"loader": {"collate_fn": default_collate}},
        {"loader": {"num_workers": 0}},
    ],
)
def test_kinds_of_data_sets(plain: Run, fields: dict[str, Any]) -> None:
    oracle.assert_same(run(programs.program(**fields)).model, plain.model.state_dict(), ROUNDING)


@pytest.mark.parametrize(
    "fields",
    [
        {"train": Scaled(*programs.data())},
        {"loader": {"collate_fn": collate}},
        {"loader": {"collate_fn": collate}, "train": Rows(programs.data())},
    ],
)
def test_what_changes_samples_on_their_way(doubled: Run, fields: dict[str, Any]) -> None:
    oracle.assert_same(run(programs.program(**fields)).model, doubled.model.state_dict(), ROUNDING)


@pytest.mark.parametrize("data", [programs.data(), Rows(programs.data())])
@pytest.mark.parametrize("aggregation", ["asynchronous", "buffered:k=1,cancel=true"])
def test_torchs_loader_with_workers_of_its_own(data: Any, aggregation: str) -> None:
    """Also where cancelled attempts pass over batches, and replicas run out of samples in the last round."""
    strategy = f"replicas=3 aggregation={aggregation}"
    expected = run(programs.program(), strategy, delay="exponential:mean=0.02")
    program = programs.program(train=data, loader={"num_workers": 1})
    loaded = run(program, strategy, delay="exponential:mean=0.02")
    oracle.assert_same(loaded.model, expected.model.state_dict(), ROUNDING)
    assert loaded.summary["cancelled"] == expected.summary["cancelled"]


class Pair(NamedTuple):
    extra: Tensor
    x: Tensor


def test_trees_of_tensors() -> None:
    """Inputs may be dicts, targets tuples or named tuples, at any depth."""
    (inputs, targets), extra = programs.data(), programs.extra()

    def loss(output: Tensor, target: Any) -> Tensor:
        first, rest = target
        return nn.functional.cross_entropy(output, first) + (output.sum(1) - rest["y"].x[:, 0]).square().mean()

    tree = {"x": inputs, "extra": extra}, (targets, {"y": Pair(extra, extra)})
    program = programs.program(model=programs.Two, loss=loss, train=tree)

    samples = [
        ({"x": inputs[i], "extra": extra[i]}, (targets[i], {"y": Pair(extra[i], extra[i])}))
        for i in range(programs.SAMPLES)
    ]
    one, other = run(program), run(programs.program(model=programs.Two, loss=loss, train=samples))
    oracle.assert_same(one.model, other.model.state_dict(), 0.0)


# --------------------------------------------------------------------------------------------- data from a function


def source(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """Each replica has its own tenth of the samples, in batches of 5 and a last one of 2."""
    inputs, targets = programs.data()
    mine = torch.arange(replica, programs.SAMPLES, replicas)[:12]
    for part in mine.split(5):
        yield inputs[part], targets[part]


@pytest.mark.parametrize("aggregation", ["synchronous", "buffered:k=1,cancel=true"])
def test_a_function_is_called_again_when_it_runs_dry(aggregation: str) -> None:
    calls: list[tuple[int, int, int]] = []

    def counted(*key: int) -> Iterator[Any]:
        calls.append(key)
        return source(*key)

    trained = run(programs.program(train=counted), f"replicas=2 aggregation={aggregation}")
    assert set(calls) == {(0, 2, 3), (1, 2, 3)}
    if aggregation == "synchronous":
        assert calls.count((1, 2, 3)) == 3, "7 steps of 3 batches a pass"
    assert trained.history[0].train_loss is None
    assert trained.history[-1].train_loss > 0, "the loss of the latest Δs stands in for a sample of the training set"


def test_a_mean_weighs_what_a_function_gives_by_its_samples() -> None:
    def uneven(replica: int, replicas: int, seed: int) -> Iterator[Any]:
        inputs, targets = programs.data()
        part = slice(0, 3) if replica == 0 else slice(3, 12)
        yield inputs[part], targets[part]

    program = programs.program()
    plain = oracle.Plain(program)
    for _ in range(STEPS):
        plain.step(plain.gradient(range(12)))
    trained = run(programs.program(train=uneven), "replicas=2")
    oracle.assert_same(trained.model, plain.values(), ROUNDING)


@pytest.mark.parametrize("looped", [False, True])
def test_what_a_function_opened_is_closed_when_the_run_ends(looped: bool) -> None:
    closed: list[int] = []

    def opened(replica: int, replicas: int, seed: int) -> Iterator[Any]:
        try:
            yield from source(replica, replicas, seed)
        finally:
            closed.append(replica)

    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)

    trained = run(programs.program(train=opened), "replicas=2", steps=2, loop=loop if looped else None)
    assert sorted(closed) == [0, 0, 1], "one of them was the trial's before the run"
    assert trained.summary["updates"] == 2


def test_a_function_that_fails_in_the_middle() -> None:
    def short(replica: int, replicas: int, seed: int) -> Iterator[Any]:
        yield from list(source(replica, replicas, seed))[:2]
        raise ConnectionError("gone")

    with pytest.raises(WorkerError, match="replica 0 failed at its step 3: ConnectionError: gone"):
        run(programs.program(train=short), "replicas=2")


def test_a_function_that_has_nothing_left() -> None:
    used: set[int] = set()

    def once(replica: int, replicas: int, seed: int) -> Iterator[Any]:
        if len(used) < 2:  # once for the trial before the run, once within it
            used.add(len(used))
            yield programs.data()

    with pytest.raises(InputError, match=r"train\(replica=0, replicas=1, seed=3\) gave no batch"):
        run(programs.program(train=once), "replicas=1")


def test_samples_that_can_not_be_read_are_named_with_their_step() -> None:
    class Bad(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 17 and torch.is_grad_enabled():  # scoring runs without gradients
                raise OSError("unreadable")
            return super().__getitem__(index)

    program = programs.program(train=Bad(programs.data()))
    order = oracle.order(programs.program(), 2)
    replica, k = next((r, k) for k in range(7) for r in range(2) if 17 in order.batch(r, k))
    assert (replica, k) != (0, 0), "the trial would meet it; choose another sample"
    with pytest.raises(WorkerError, match=f"replica {replica} failed at its step {k + 1}: OSError: unreadable"):
        run(program, "replicas=2", epochs=1, steps=None)


def test_augmentation_is_reproducible() -> None:
    """Random numbers that samples draw from torch follow from the program's seed."""

    class Noisy(Rows):
        def __getitem__(self, index: int) -> Any:
            inputs, targets = super().__getitem__(index)
            return inputs + torch.randn_like(inputs), targets

    program = programs.program(train=Noisy(programs.data()), optimizer=functools.partial(torch.optim.SGD, lr=0.01))
    torch.manual_seed(1)
    one = run(program)
    torch.manual_seed(2)
    other = run(program)
    oracle.assert_same(one.model, other.model.state_dict(), 0.0)
    assert one.history == other.history
