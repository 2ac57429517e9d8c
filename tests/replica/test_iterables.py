"""An IterableDataset is divided by batches, each replica reading a copy of its own."""

import itertools
import random
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline import InputError, Program, Run, train
from paceline.checkpoint.fingerprint import fingerprint
from paceline.replica.batches import BatchSource
from tests import oracle
from tests.engine import programs


class Counting(IterableDataset[Any]):
    """Samples 0, 1, ...; each worker of a loader has its part of them.

    Args:
        samples: None: without end.
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = itertools.count(first, step) if self.samples is None else range(first, self.samples, step)
        return ((torch.tensor(i), torch.tensor(-i)) for i in numbers)


class Shuffling(Counting):
    """Draws an order for each pass, from the generators that are at hand."""

    def __iter__(self) -> Iterator[Any]:
        assert self.samples is not None
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        return ((torch.tensor(order[i]), torch.tensor(-order[i])) for i in np.random.permutation(self.samples))


class Once(Counting):
    """Is its own iterator, so that iterating leaves something in it."""

    def __iter__(self) -> Any:
        self.at = getattr(self, "at", 0)
        return self

    def __next__(self) -> Any:
        if self.at == self.samples:
            self.at = 0
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at - 1), torch.tensor(1 - self.at)


class Rows(IterableDataset[Any]):
    """The samples of the usual program."""

    def __iter__(self) -> Iterator[Any]:
        return zip(*programs.data(), strict=True)


class Short(IterableDataset[Any]):
    """Two batches."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(zip(*programs.data(), strict=True), 7)


class Batches(IterableDataset[Any]):
    """Batches rather than samples, as a stream may give them."""

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = programs.data()
        return zip(inputs.split(4), targets.split(4), strict=True)


class Open(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, encoding="utf-8")  # noqa: SIM115


def program(data: Any, **fields: Any) -> Program:
    return programs.program(**{"train": data} | fields)


def taken(data: Any, replica: int, replicas: int, count: int, **fields: Any) -> list[list[int]]:
    with closing(BatchSource(program(data, **fields), None, replicas)) as source:
        batches = list(itertools.islice(source.stream(replica), count))
    assert all(torch.equal(batch.input, -batch.target) and batch.samples == len(batch.input) for batch in batches)
    return [batch.input.tolist() for batch in batches]


def test_each_replica_takes_every_pth_batch() -> None:
    assert taken(Counting(), 1, 3, 2) == [[4, 5, 6, 7], [16, 17, 18, 19]]
    assert [taken(Counting(10), r, 2, 3) for r in (0, 1)] == [
        [[0, 1, 2, 3], [8, 9], [0, 1, 2, 3]],
        [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]],
    ]
    assert taken(Counting(10), 0, 1, 3, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Shuffling, Once])
def test_a_pass_is_divided_whatever_it_draws(kind: type[Counting], workers: int) -> None:
    """And passes differ where they are drawn; what the process itself draws makes no difference."""
    passes = []
    for replica in range(3):
        torch.manual_seed(replica)
        random.seed(replica)
        batches = taken(kind(24), replica, 3, 4, loader={"num_workers": workers})
        passes.append([batches[:2], batches[2:]])
    for number in (0, 1):
        seen = [i for own in passes for batch in own[number] for i in batch]
        assert sorted(seen) == list(range(24))
    assert (passes[0][0] != passes[0][1]) == (kind is Shuffling)


def test_the_generators_of_the_process_go_on_as_if_nothing_had_been_drawn() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = [drawn(), drawn()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with closing(BatchSource(program(Shuffling(24)), None, 1)) as source:
        source.at(0, 0)
        found = [drawn()]
        source.at(0, 1)
        assert [*found, drawn()] == expected


def test_the_users_own_is_left_as_it_was() -> None:
    data = Once(24)
    assert taken(data, 0, 2, 1) == taken(data, 0, 2, 1) == [[0, 1, 2, 3]]
    assert not hasattr(data, "at")


@pytest.mark.parametrize("loader", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_workers_share_a_pass_as_the_data_set_says(loader: dict[str, Any]) -> None:
    batches = [taken(Counting(16), r, 2, 2, loader=loader) for r in (0, 1)]
    assert batches == [[[0, 2, 4, 6], [8, 10, 12, 14]], [[1, 3, 5, 7], [9, 11, 13, 15]]]


def test_data_sets_that_count_passes_are_told() -> None:
    class Epochs(Counting):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return ((torch.tensor(self.epoch), torch.tensor(-self.epoch)) for _ in range(4))

    assert taken(Epochs(), 0, 1, 3) == [[0] * 4, [1] * 4, [2] * 4]


def run(data: Any, strategy: str = "replicas=3", fields: dict[str, Any] | None = None, **settings: Any) -> Run:
    settings = {"engine": "virtual", "progress": False, "steps": 7} | settings
    return train(program(data, **(fields or {})), strategy, **settings)


def of_function(replica: int, replicas: int, seed: int) -> Iterator[Any]:
    """The batches of Rows, as the user would divide them."""
    inputs, targets = programs.data()
    return itertools.islice(zip(inputs.split(4), targets.split(4), strict=True), replica, None, replicas)


@pytest.mark.parametrize("aggregation", ["synchronous", "asynchronous", "local-steps:period=2"])
@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (Rows(), {}),
        (DataLoader(Rows(), batch_size=4), {"batch_size": None}),
        (DataLoader(Rows(), batch_size=4, num_workers=1), {"batch_size": None}),
        (DataLoader(Batches(), batch_size=None), {"batch_size": None}),
        (Batches(), {"loader": {"batch_size": None}}),
    ],
)
def test_a_run_is_that_of_the_function(data: Any, fields: dict[str, Any], aggregation: str) -> None:
    strategy = f"replicas=3 aggregation={aggregation}"
    found, expected = run(data, strategy, fields), run(of_function, strategy)
    oracle.assert_same(found.model, expected.model.state_dict(), 0.0)  # the same sums in the same order


def test_processes_divide_it(engine: Any, tmp_path: Path) -> None:
    """And go on where they were: those that were taken are skipped."""
    whole = run(Rows(), "replicas=2", engine=engine)
    oracle.assert_same(whole.model, run(of_function, "replicas=2").model.state_dict(), 1e-13)
    run(Rows(), "replicas=2", engine=engine, steps=4, checkpoint=tmp_path)
    rest = run(Rows(), "replicas=2", engine=engine, checkpoint=tmp_path, resume=True)
    oracle.assert_same(rest.model, whole.model.state_dict(), 1e-13)


def test_a_loader_over_it_is_the_same_program() -> None:
    loaded, plain = program(DataLoader(Counting(10), batch_size=4), batch_size=None), program(Counting(10))
    module = plain.build()
    assert fingerprint(loaded, module) == fingerprint(plain, module)
    assert fingerprint(program(Counting(11)), module)["training set"] != fingerprint(plain, module)["training set"]


@pytest.mark.parametrize(
    ("fields", "strategy", "settings", "match"),
    [
        ({}, "replicas=2", {"steps": None, "epochs": 1}, "epochs= needs .* train= is an IterableDataset; write steps="),
        ({}, "replicas=2 partition=disjoint", {}, "partition=disjoint needs a training set to divide"),
        (
            {},
            "replicas=2 aggregation=sandblaster:portions=2",
            {},
            "train= is an IterableDataset.*write train= as a data",
        ),
        (
            {"batch_size": None, "global_batch_size": 8},
            "replicas=2",
            {},
            "global_batch_size= has no effect.*batch_size=",
        ),
        ({"shuffle": True}, "replicas=2", {}, "shuffle=True has no effect: train= is an IterableDataset"),
        ({"train": Short()}, "replicas=3", {}, "train=Short has no batch for replica 2 of 3 in a pass"),
        ({"train": Open()}, "replicas=2", {}, "Open can't be copied for each replica: TypeError.*files and generators"),
        ({"loader": {"batch_size": 2}}, "replicas=2", {}, "leave batch_size out"),
        ({"loader": {"batch_size": None}, "drop_last": True}, "replicas=2", {}, "drop_last=True has no effect"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], strategy: str, settings: dict[str, Any], match: str) -> None:
    numbers = {"model": lambda: torch.nn.Linear(6, 3).double(), "train": Rows()}
    with pytest.raises(Exception, match=match) as raised:
        train(
            programs.program(**numbers | fields), strategy, engine="virtual", progress=False, **{"steps": 2} | settings
        )
    assert isinstance(raised.value, InputError) or "Counting" in match


def test_the_state_of_a_stateful_loader_is_not_needed() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    with warnings.catch_warnings(action="ignore"):  # torchdata 0.11 calls what torch 2.13 has deprecated
        loader = stateful.StatefulDataLoader(Rows(), batch_size=4)
    found = run(loader, fields={"batch_size": None})
    oracle.assert_same(found.model, run(of_function).model.state_dict(), 0.0)
