"""A DataLoader is read into the fields of a program: the run is that of its data set with these fields."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from paceline import InputError, Program, Run, train
from paceline.checkpoint.fingerprint import fingerprint
from paceline.loaders import parts_of
from tests import oracle
from tests.engine import programs
from tests.engine.programs import Rows

STEPS = 9


class Generic(nn.Module):
    """Takes a batch of dicts' inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = programs.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


ROWS = Rows(programs.data())


def doubled(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return 2 * inputs, targets


def initialize(worker: int) -> None:
    torch.set_num_threads(1)


def from_loader(loader: Any, **fields: Any) -> Program:
    return programs.program(**{"train": loader, "batch_size": None} | fields)


def run(program: Program, strategy: str = "replicas=1", **settings: Any) -> Run:
    return train(program, strategy, **{"engine": "virtual", "progress": False, "steps": STEPS} | settings)


def assert_equal_runs(program: Program, other: Program, strategy: str) -> None:
    first, second = run(program, strategy), run(other, strategy)
    oracle.assert_same(first.model, second.model.state_dict(), 0.0)  # the same sums in the same order
    module = program.build()
    assert fingerprint(program, module) == fingerprint(other, module)


WORKERS = {
    "num_workers": 1,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "worker_init_fn": initialize,
    "multiprocessing_context": "fork",
    "timeout": 60,
}

LOADERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffled": ({"batch_size": 4, "shuffle": True}, {"batch_size": 4}),
    "in order": ({"batch_size": 4}, {"batch_size": 4, "shuffle": False}),
    "without a last batch": (
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 4, "drop_last": True},
    ),
    "collated": (
        {"batch_size": 3, "shuffle": True, "collate_fn": doubled},
        {"batch_size": 3, "loader": {"collate_fn": doubled}},
    ),
    "a subset": (
        {"batch_size": 4, "sampler": SubsetRandomSampler(range(5, 40))},
        {"batch_size": 4, "train": Subset(ROWS, range(5, 40))},
    ),
    "a batch sampler": (
        {"batch_sampler": BatchSampler(RandomSampler(ROWS), 4, True)},
        {"batch_size": 4, "drop_last": True},
    ),
    "workers": ({"batch_size": 4, "shuffle": True, **WORKERS}, {"batch_size": 4, "loader": WORKERS}),
}


@pytest.mark.parametrize(
    "strategy", ["replicas=1", "replicas=3 aggregation=asynchronous", "replicas=2 partition=disjoint"]
)
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_is_that_of_its_data_set(name: str, strategy: str) -> None:
    arguments, fields = LOADERS[name]
    assert_equal_runs(
        from_loader(DataLoader(ROWS, **arguments)), programs.program(**{"train": ROWS} | fields), strategy
    )


def test_a_loader_of_tensors_is_read_as_tensors() -> None:
    loader = DataLoader(TensorDataset(*programs.data()), batch_size=4, shuffle=True)
    assert_equal_runs(from_loader(loader), programs.program(), "replicas=3")


@pytest.mark.parametrize("drop_last", [False, True])
def test_in_order_a_run_is_the_plain_loop_over_the_loader(drop_last: bool) -> None:
    loader = DataLoader(ROWS, batch_size=4, drop_last=drop_last)
    program = from_loader(loader)
    plain = oracle.Plain(program)
    for inputs, targets in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 20):
        plain.optimizer.zero_grad()
        nn.functional.cross_entropy(plain.module(inputs), targets).backward()
        plain.optimizer.step()
    oracle.assert_same(run(program, steps=20).model, plain.values(), 1e-14)  # A is one flat vector here


def test_epochs_without_a_last_round_have_only_full_batches() -> None:
    sizes: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(target))
        return nn.functional.cross_entropy(output, target)

    loader = DataLoader(ROWS, batch_size=4, drop_last=True)  # 50 samples: 4 rounds of 12
    result = run(from_loader(loader, loss=loss), "replicas=3", steps=None, epochs=2)
    assert set(sizes) == {4, 50}  # of steps, and of the evaluation of the training set
    assert (result.summary["updates"], result.summary["gradients"]) == (8, 24)


def test_it_goes_on_in_order_where_it_was_saved(tmp_path: Any) -> None:
    loader = DataLoader(ROWS, batch_size=4, drop_last=True)
    whole = run(from_loader(loader), "replicas=2", steps=13)
    run(from_loader(loader), "replicas=2", steps=7, checkpoint=tmp_path)
    program = programs.program(train=ROWS, batch_size=4, shuffle=False, drop_last=True)
    rest = run(program, "replicas=2", steps=13, checkpoint=tmp_path, resume=True)
    oracle.assert_same(rest.model, whole.model.state_dict(), 0.0)
    with pytest.raises(InputError, match="order of the data is as it is in the checkpoint, but shuffled"):
        run(programs.program(train=ROWS, batch_size=4, drop_last=True), steps=14, checkpoint=tmp_path, resume=True)


def test_the_test_set_comes_from_a_loader() -> None:
    test = Rows(programs.data(samples=20))
    result = run(programs.program(test=DataLoader(test, batch_size=3, shuffle=True)))
    expected = run(programs.program(test=test))
    assert result.history[-1].test_loss == expected.history[-1].test_loss
    assert result.history[-1].test_accuracy is not None


def test_parts_are_those_that_differ_from_the_defaults() -> None:
    assert parts_of(DataLoader(ROWS)).options == {}
    assert parts_of(DataLoader(ROWS, num_workers=2)).options == {"num_workers": 2}
    assert parts_of(DataLoader(ROWS, pin_memory=True)).options == {"pin_memory": True}


def test_workers_of_processes_read_from_a_loader(engine: Any) -> None:
    loader = DataLoader(ROWS, batch_size=4, shuffle=True, num_workers=1, pin_memory=True)
    result = run(from_loader(loader), "replicas=2", engine=engine)
    oracle.assert_same(result.model, run(programs.program(), "replicas=2").model.state_dict(), 1e-13)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([programs.data()])


class Every(BatchSampler):
    """A batch sampler of one's own."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": (
        {"train": DataLoader(ROWS, batch_size=4), "batch_size": 8},
        r"batch_size=8, but train= is a DataLoader with batch_size=4; leave batch_size out, or write DataLoader\(batch",
    ),
    "global batch size": (
        {"train": DataLoader(ROWS, batch_size=4), "global_batch_size": 8},
        "global_batch_size=8, but train= is a DataLoader with batch_size=4 per replica",
    ),
    "shuffling": (
        {"train": DataLoader(ROWS), "shuffle": True},
        "shuffle=True, but train= is a DataLoader with shuffle=F",
    ),
    "an option": (
        {"train": DataLoader(ROWS, num_workers=2), "loader": {"num_workers": 1}},
        "num_workers=1, but train= is a DataLoader with num_workers=2",
    ),
    "weights": (
        {"train": DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 50, 50))},
        r"sampler WeightedRandomSampler, whose order .* write for batch in worker.data\(loader\)",
    ),
    "replacement": (
        {"train": DataLoader(ROWS, sampler=RandomSampler(ROWS, replacement=True))},
        "sampler RandomSampler, whose order",
    ),
    "a part": (
        {"train": DataLoader(ROWS, sampler=SequentialSampler(range(7)))},
        "sampler SequentialSampler, whose order",
    ),
    "batches": (
        {"train": DataLoader(ROWS, batch_sampler=Every(SequentialSampler(ROWS), 2, False))},
        "batch_sampler Every, whose order",
    ),
    "a list of samples": ({"train": DataLoader(ROWS, batch_size=8, sampler=[0, 1])}, "has a sampler list, whose order"),
    "a list of batches": ({"train": DataLoader(ROWS, batch_sampler=[[0, 1], [2]])}, "batch_sampler list, whose order"),
    "distributed": (
        {"train": DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0))},
        "Paceline divides batches itself; leave the sampler out",
    ),
    "a generator": (
        {"train": DataLoader(ROWS, shuffle=True, generator=torch.Generator())},
        "has a generator=, but the order is drawn from the program's seed; leave generator out and write seed=",
    ),
    "no batches": ({"train": DataLoader(ROWS, batch_size=None)}, "batch_size=None gives single items"),
    "any order": ({"train": DataLoader(ROWS, num_workers=1, in_order=False)}, "leave in_order out"),
    "a class of one's own": ({"train": Own(ROWS)}, "Own iterates in a way of its own.*itertools.islice"),
    "test collated otherwise": (
        {"test": DataLoader(ROWS, collate_fn=doubled)},
        "test= is a DataLoader with collate_fn=.*give both the same one",
    ),
    "a sampler of test": (
        {"test": DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 50, 50))},
        "test= has a sampler WeightedRandomSampler",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_loader_can_not_say(name: str) -> None:
    fields, match = REFUSED[name]
    with pytest.raises(InputError, match=match):
        programs.program(**{"batch_size": None} | fields)


def numbers() -> Iterator[Any]:
    yield programs.data()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*programs.data(), strict=True)


INPUTS, TARGETS = programs.data()
OTHERS: dict[str, tuple[Any, str]] = {
    "a list of tensors": ([INPUTS, TARGETS], r"samples would be Tensor; write train=\(inputs, targets\), two tensors"),
    "a tensor": (INPUTS, r"train is a Tensor, no data set; write train=\(inputs, targets\)"),
    "an array": (INPUTS.numpy(), r"a ndarray, no data set; write train=\(torch.from_numpy\(inputs\), torch.from_numpy"),
    "two arrays": ((INPUTS.numpy(), TARGETS.numpy()), r"write train=\(inputs, targets\); arrays as torch.from_numpy"),
    "a dict": (
        {"x": INPUTS, "y": TARGETS},
        r"a dict of x, y, no .* write train=\(train_dict\['x'\], train_dict\['y'\]\)",
    ),
    "a larger dict": (
        {"a": INPUTS, "labels": TARGETS, "b": INPUTS},
        r"write train=\(\{'a': train_dict\['a'\], 'b': train_dict\['b'\]\}, train_dict\['labels'\]\)",
    ),
    "a numbered dict": (dict(enumerate(ROWS.targets)), r"no data set; write train=list\(data.values\(\)\)"),
    "splits": ({"train": ROWS, "test": ROWS}, r"a dict of train, test, .* write train=splits\['train'\]"),
    "a frame": (
        pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]}),
        r"a DataFrame, .* write train=\(torch.tensor\(frame\[inputs\].to_numpy\(\)\), torch.tensor\(frame\[target\]",
    ),
    "a generator": (numbers(), "a generator, .* can be read only once; write train=function"),
    "an iterator": (iter([programs.data()]), "can be read only once; write train=function"),
    "a path": ("data/train.csv", "a str, no data set; write train=, a data set that has been read from there"),
    "a number": (3, r"train=int is no map-style dataset .* or a function \(replica, replicas, seed\)"),
    "an empty list": ([], "train has no samples"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_data_set(name: str) -> None:
    data, match = OTHERS[name]
    with pytest.raises(InputError, match=match):
        programs.program(train=data)


@pytest.mark.parametrize("data", [list(range(50)), torch.arange(50)])
def test_what_is_collated_may_be_any_samples(data: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return default_collate([ROWS[int(i)] for i in samples])

    found = run(programs.program(train=data, loader={"collate_fn": collate}))
    oracle.assert_same(found.model, run(programs.program(train=ROWS)).model.state_dict(), 0.0)


def test_what_is_no_test_set() -> None:
    with pytest.raises(InputError, match=r"test=Stream has no length, .* write test=list\(itertools.islice"):
        programs.program(test=Stream())
    with pytest.raises(InputError, match=r"test=function is no map-style dataset .* write test=\(inputs, targets\)$"):
        programs.program(test=numbers)


def test_what_is_written_instead_is_taken() -> None:
    """The lines of the messages above."""
    frame = pandas.DataFrame({"a": np.arange(6.0), "b": np.arange(6.0), "y": [0, 1, 2, 0, 1, 2]})
    pair = (torch.tensor(frame[["a", "b"]].to_numpy()), torch.tensor(frame["y"].to_numpy()))
    model = functools.partial(nn.Linear, 2, 3, dtype=torch.float64)
    assert run(programs.program(train=pair, model=model)).summary["updates"] == STEPS
    array, targets = INPUTS.numpy(), TARGETS.numpy()
    same = run(programs.program(train=(torch.from_numpy(array), torch.from_numpy(targets))))
    oracle.assert_same(same.model, run(programs.program()).model.state_dict(), 0.0)
    train_dict = {"x": INPUTS, "labels": TARGETS}
    rows = run(programs.program(train=({"x": train_dict["x"]}, train_dict["labels"]), model=Generic))
    samples = [{"x": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]
    oracle.assert_same(run(programs.program(train=samples, model=Generic)).model, rows.model.state_dict(), 0.0)
