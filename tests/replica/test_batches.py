"""Batches follow the order of the data, from whatever kind of data set."""

import random
from collections import Counter
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from paceline import InputError
from paceline.core.data_order import DataOrder
from paceline.replica.base import Batch, as_batch
from paceline.replica.batches import BatchSource, fetcher
from tests.engine import programs


class Numbers(Dataset[Any]):
    """Sample i is (i, -i)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.tensor(-index)


class Noisy(Dataset[Any]):
    """Sample i is i with numbers of all generators; a worker's function sees it, and not what is around it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float(torch.rand(())), random.random(), np.random.rand()]), torch.tensor(index)


def noisy(replica: int, replicas: int, seed: int) -> Any:
    """Yield passes of three batches, drawn as no data should be."""
    return ((torch.rand(2, 3), torch.tensor([random.random(), np.random.rand()])) for _ in range(3))


def sees_noisy(worker: int) -> None:
    assert type(get_worker_info().dataset) is Noisy


TENSORS = (torch.arange(10), -torch.arange(10))
ORDER = DataOrder(samples=10, batch_size=3, replicas=3, seed=1)
"""An epoch is one full round and one in which a single sample is left."""


@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("data", [TENSORS, TensorDataset(*TENSORS), Numbers()])
@pytest.mark.parametrize("replica", [0, 2])
def test_a_stream_is_the_order(replica: int, data: Any, loader: dict[str, Any]) -> None:
    program = programs.program(train=data, loader=loader)
    with closing(BatchSource(program, ORDER, 3)) as source:
        for k, batch in enumerate(islice(source.stream(replica), 7)):
            is_batch(batch, replica, k)


@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}])
def test_batches_of_any_stream_come_when_they_are_asked_for(loader: dict[str, Any]) -> None:
    """What is fetched ahead is the replica's own stream; from the others a batch may come in between."""
    with closing(BatchSource(programs.program(train=TENSORS, loader=loader), ORDER, 3)) as source:
        for stream, k in [(1, 0), (1, 1), (2, 0), (1, 4), (0, 3), (1, 5), (1, 2)]:
            is_batch(source.at(stream, k), stream, k)


@pytest.mark.parametrize(("data", "prepares"), [(TENSORS, True), (TensorDataset(*TENSORS), True), (Numbers(), False)])
def test_the_next_batch_is_there_when_it_is_asked_for(data: Any, prepares: bool, monkeypatch: Any) -> None:
    """Unless somebody's code makes it, or another one than the last time is asked for."""
    made: list[tuple[int, int]] = []
    batch = DataOrder.batch
    with closing(BatchSource(programs.program(train=data), ORDER, 3)) as source:
        monkeypatch.setattr(DataOrder, "batch", lambda order, *key: made.append(key) or batch(order, *key))
        for stream, k in [(1, 0), (1, 1), (1, 2), (2, 5), (1, 3), (1, 4)]:
            found = source.at(stream, k)
            source.prepare()
            source.prepare()
            before = list(made)
            is_batch(found, stream, k)
            made[:] = before
    expected = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 5), (1, 3), (1, 4), (1, 5)]
    assert made == (expected if prepares else [(1, 0), (1, 1), (1, 2), (2, 5), (1, 3), (1, 4)])


@pytest.mark.parametrize(("size", "together"), [(16, True), (12, False)])
@pytest.mark.parametrize("tree", [False, True])
def test_small_batches_are_gathered_several_at_once(size: int, together: bool, tree: bool) -> None:
    """All those of the order, over epochs of six and a smaller one; each begins at a cache line, or is by itself."""
    inputs, targets = torch.arange(200), -torch.arange(200)
    train: Any = ({"x": inputs}, [targets]) if tree else (inputs, targets)
    order, memories = DataOrder(200, size, 2, 1), []
    with closing(BatchSource(programs.program(train=train), order, 2)) as source:
        for k in range(60):
            batch = source.at(1, k)
            source.prepare()
            found = batch.input["x"] if tree else batch.input
            found_targets = batch.target[0] if tree else batch.target
            expected = order.batch(1, k)
            assert found.tolist() == expected.tolist() == (-found_targets).tolist()
            assert batch.samples == len(expected)
            assert found.data_ptr() % 64 == found_targets.data_ptr() % 64 == 0
            memories.append(found.untyped_storage())  # kept, so that no memory is used twice
    assert max(Counter(memory.data_ptr() for memory in memories).values()) == (6 if together else 1)


@pytest.mark.parametrize("tree", [False, True])
def test_to_write_into_a_batch_is_not_to_write_into_the_next(tree: bool) -> None:
    """Neither its values nor the counter by which autograd knows of it; two batches may be under way in a pipeline."""
    inputs, targets = torch.arange(160.0), torch.zeros(160)
    train: Any = ({"x": inputs}, targets) if tree else (inputs, targets)
    order, weight = DataOrder(160, 16, 1, 1), torch.ones((), requires_grad=True)
    under_way = []
    with closing(BatchSource(programs.program(train=train), order, 1)) as source:
        for k in range(10):
            batch = source.at(0, k)
            source.prepare()
            found = batch.input["x"] if tree else batch.input
            under_way.append((weight * found.mul_(2)).sum())
    for k, loss in enumerate(under_way):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient == 2 * order.batch(0, k).sum()


def test_large_batches_are_gathered_one_by_one() -> None:
    images = torch.zeros(64, 1 << 13)
    order, memories = DataOrder(64, 8, 1, 1), []
    with closing(BatchSource(programs.program(train=(images, torch.zeros(64, 8))), order, 1)) as source:
        for k in range(20):
            memories.append(source.at(0, k).input.untyped_storage())
            source.prepare()
    assert len({memory.data_ptr() for memory in memories}) == 20


@pytest.mark.parametrize("loader", [{}, {"num_workers": 2, "worker_init_fn": sees_noisy}])
def test_what_a_batch_draws_is_a_function_of_its_number(loader: dict[str, Any]) -> None:
    program, in_process = (programs.program(train=Noisy(), loader=each) for each in (loader, {}))
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with closing(BatchSource(in_process, ORDER, 3)) as source:
        expected = {(stream, k): source.at(stream, k).input for stream, k in [(1, 2), (1, 0), (0, 1), (1, 4)]}
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    draws = torch.cat([batch[:, 1:].flatten() for batch in expected.values()])
    assert len(draws.unique()) == len(draws)
    torch.rand(5)
    with closing(BatchSource(program, ORDER, 3)) as source:
        for stream, k in [(1, 0), (1, 2), (1, 4), (0, 1)]:
            assert torch.equal(source.at(stream, k).input, expected[stream, k])


def test_what_a_function_draws_is_a_function_of_the_batchs_number() -> None:
    whole, resumed = (BatchSource(programs.program(train=noisy), None, 2) for _ in range(2))
    batches = []
    for k in range(6):
        batches.append(whole.at(1, k))
        torch.rand(k)  # as dropout does between them
    for k in (4, 5):
        again = resumed.at(1, k)
        assert torch.equal(again.input, batches[k].input)
        assert torch.equal(again.target, batches[k].target)


def test_a_function_is_called_once_for_batches_in_their_order() -> None:
    def numbered(replica: int, replicas: int, seed: int) -> Any:
        return ((torch.tensor([k]), torch.tensor([replica])) for k in range(3))

    source = BatchSource(programs.program(train=numbered), None, 2)
    assert [source.at(1, k).input.item() for k in (1, 2, 3, 7)] == [1, 2, 0, 1]


def is_batch(batch: Batch, stream: int, k: int) -> None:
    expected = ORDER.batch(stream, k)
    assert batch.samples == len(expected)
    if len(expected):
        assert batch.input.tolist() == expected.tolist() == (-batch.target).tolist()
    else:
        assert batch == Batch(None, None, 0)


@pytest.mark.parametrize("data", [TENSORS, Numbers()])
def test_collating_is_the_programs(data: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return [int(i) for i, _ in samples], len(samples)

    assert fetcher(data, {"collate_fn": collate})(torch.tensor([3, 1]).numpy()) == ([3, 1], 2)


class Columns(list[Any]):
    """Has the method of data sets of Hugging Face."""

    def remove_columns(self, names: list[str]) -> Any:
        raise NotImplementedError


def test_samples_that_make_no_batch_say_what_to_write() -> None:
    rows, texts = [(torch.zeros(2 + i), torch.tensor(i)) for i in range(3)], [{"x": torch.ones(2), "name": "a"}]
    with pytest.raises(InputError, match=r"got \[2\] at entry 0 and \[3\] .* write loader=\{'collate_fn': pad\}"):
        fetcher(rows, {})(np.arange(3))
    for data, says in ((texts, "leave them out"), (Columns(texts), r"train=dataset\.remove_columns\(\['name'\]\)")):
        with pytest.raises(InputError, match=says):
            fetcher(data, {})(np.arange(1))


def test_trees_are_indexed_leaf_by_leaf() -> None:
    tree = ({"a": TENSORS[0], "b": (TENSORS[1],)}, [TENSORS[0]])
    inputs, targets = fetcher(tree, {})(torch.tensor([3, 1]).numpy())
    assert (inputs["a"].tolist(), inputs["b"][0].tolist(), targets[0].tolist()) == ([3, 1], [-3, -1], [3, 1])


@pytest.mark.parametrize(
    ("item", "samples"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), 3),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        (({"x": torch.zeros(4, 1)}, None), 4),
        (((torch.zeros(2), torch.zeros(2)), {"y": torch.zeros(2)}), 2),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_target(item: Any, samples: int) -> None:
    assert as_batch(item).samples == samples


def test_a_batch_is_taken_as_it_is() -> None:
    batch = Batch(1, 2, 3)
    assert as_batch(batch) is batch


@pytest.mark.parametrize("item", [5, (1, 2, 3), "ab", torch.zeros(2, 2)])
def test_what_is_no_batch(item: Any) -> None:
    with pytest.raises(InputError, match=r"a batch must be \(input, target\), but is"):
        as_batch(item)


@pytest.mark.parametrize("item", [(1, 2), (torch.tensor(1.0), torch.tensor(2.0))])
def test_what_has_no_samples(item: Any) -> None:
    with pytest.raises(InputError, match="a batch needs a tensor with samples along dim 0"):
        as_batch(item)
