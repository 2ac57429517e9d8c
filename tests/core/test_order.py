"""Every sample once an epoch, and the same stream whoever asks in whatever order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import data_order as module
from paceline.core.data_order import DataOrder, Partition
from paceline.core.errors import InputError

PARTITIONS: list[Partition] = ["global", "disjoint"]
sizes = st.integers(1, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**40)


def epoch_of(order: DataOrder, epoch: int) -> list[int]:
    """All samples that all replicas see in one epoch, replica by replica."""
    return [
        sample
        for replica in range(order.replicas)
        for k in range(order.rounds_per_epoch(replica) * epoch, order.rounds_per_epoch(replica) * (epoch + 1))
        for sample in order.batch(replica, k).tolist()
    ]


@given(*sizes, st.integers(0, 30))
def test_synchronous_replicas_see_what_one_process_with_the_whole_batch_sees(
    samples: int, batch_size: int, replicas: int, seed: int, k: int
) -> None:
    order = DataOrder(samples, batch_size, replicas, seed)
    alone = DataOrder(samples, batch_size * replicas, 1, seed)
    together = np.concatenate([order.batch(replica, k) for replica in range(replicas)])
    assert together.tolist() == alone.batch(0, k).tolist()
    assert order.rounds_per_epoch(0) == alone.rounds_per_epoch(0)


@pytest.mark.parametrize("partition", PARTITIONS)
@given(*sizes, st.integers(0, 3))
def test_an_epoch_covers_every_sample_exactly_once(
    partition: Partition, samples: int, batch_size: int, replicas: int, seed: int, epoch: int
) -> None:
    order = DataOrder(max(samples, replicas), batch_size, replicas, seed, partition)
    assert sorted(epoch_of(order, epoch)) == list(range(order.samples))


@pytest.mark.parametrize("partition", PARTITIONS)
@given(*sizes, st.integers(0, 40), st.data())
def test_size_agrees_with_the_batch(
    partition: Partition, samples: int, batch_size: int, replicas: int, seed: int, k: int, data: st.DataObject
) -> None:
    order = DataOrder(max(samples, replicas), batch_size, replicas, seed, partition)
    replica = data.draw(st.integers(0, replicas - 1))
    assert order.size(replica, k) == len(order.batch(replica, k)) <= batch_size


@pytest.mark.parametrize(
    ("samples", "batch_size", "replicas", "expected"),
    [
        (24, 4, 3, [[4, 4, 4], [4, 4, 4]]),
        (25, 4, 3, [[4, 4, 4], [4, 4, 4], [1, 0, 0]]),
        (23, 4, 3, [[4, 4, 4], [4, 4, 3]]),
        (19, 4, 3, [[4, 4, 4], [3, 2, 2]]),
        (2, 4, 3, [[1, 1, 0]]),
    ],
)
def test_the_last_round_is_spread_evenly(
    samples: int, batch_size: int, replicas: int, expected: list[list[int]]
) -> None:
    order = DataOrder(samples, batch_size, replicas, seed=1)
    rounds = [[order.size(replica, k) for replica in range(replicas)] for k in range(order.rounds_per_epoch(0))]
    assert rounds == expected


def test_disjoint_subsets_are_fixed_and_shuffled_anew() -> None:
    order = DataOrder(samples=50, batch_size=4, replicas=3, seed=5, partition="disjoint")
    rounds = order.rounds_per_epoch(1)
    first, second = (
        np.concatenate([order.batch(1, epoch * rounds + k) for k in range(rounds)]).tolist() for epoch in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)
    assert [order.size(1, k) for k in range(rounds)] == [4, 4, 4, 4, 1]


def test_disjoint_replicas_may_have_one_round_more() -> None:
    order = DataOrder(samples=9, batch_size=4, replicas=2, seed=0, partition="disjoint")
    assert [order.rounds_per_epoch(replica) for replica in range(2)] == [2, 1]


def test_global_epochs_differ_and_seeds_differ() -> None:
    order, other = DataOrder(100, 10, 2, seed=0), DataOrder(100, 10, 2, seed=1)
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert epoch_of(order, 0) != epoch_of(other, 0)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_was_asked_before_changes_nothing(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_INDICES", 0)
    order = DataOrder(64, 4, 4, 3, partition)
    asked = [(replica, k) for replica in range(4) for k in range(40)]
    np.random.default_rng(0).shuffle(asked)
    for replica, k in asked:
        fresh = DataOrder(64, 4, 4, 3, partition)
        assert order.batch(replica, k).tolist() == fresh.batch(replica, k).tolist()


def test_replicas_far_apart_share_few_permutations(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, ...]] = []
    original = module._permutation

    def counted(*key: int) -> object:
        built.append(key)
        return original(*key)

    monkeypatch.setattr(module, "_permutation", counted)
    order = DataOrder(samples=4000, batch_size=4, replicas=1000, seed=0)
    for step in range(50):
        for replica in range(1000):
            order.batch(replica, step * (1 + replica % 2))
    assert len(built) == 75  # epochs 0 .. 49, and the even ones up to 98


def test_epochs_that_are_needed_again_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many replicas are epochs apart, more are kept, up to a bound; one that only goes on keeps few."""
    built: list[tuple[int, ...]] = []
    permutation = module._permutation
    monkeypatch.setattr(module, "_permutation", lambda *key: built.append(key) or permutation(*key))
    monkeypatch.setattr(module, "_KEPT_INDICES", 0)
    monkeypatch.setattr(module, "_MOST_INDICES", 20 * 100)

    def shuffled(rounds: list[list[int]]) -> list[int]:
        order, counts = DataOrder(samples=100, batch_size=10, replicas=10, seed=0), list[int]()
        for epochs in rounds:
            built.clear()
            for epoch in epochs:
                order.batch(0, epoch)
            counts.append(len(built))
        return counts

    near = [*range(16)]
    assert shuffled([near] * 6)[-1] == 0
    assert min(shuffled([[*range(40)]] * 6)) > 0
    assert shuffled([[*range(0, 100)], [*range(96, 100)], [99]]) == [100, 0, 0]


def test_a_batch_belongs_to_its_caller() -> None:
    order = DataOrder(10, 5, 1, seed=0)
    before = order.batch(0, 0).tolist()
    order.batch(0, 0)[:] = -1
    assert order.batch(0, 0).tolist() == before
    assert order.batch(0, 0).base is None
    assert order.batch(0, 0).dtype == np.int64


def test_equal_fields_are_equal_orders() -> None:
    asked = DataOrder(10, 2, 2, 0)
    asked.batch(0, 0)
    assert asked == DataOrder(10, 2, 2, 0)
    assert asked != DataOrder(10, 2, 2, 0, "disjoint")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"replicas": -1}, "replicas=-1"),
        ({"seed": -3}, "write seed=3"),
        ({"partition": "disjont"}, "did you mean 'disjoint'"),
        ({"partition": "disjoint", "replicas": 11}, "write partition=global or replicas=10"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DataOrder(**({"samples": 10, "batch_size": 2, "replicas": 2, "seed": 0} | fields))  # type: ignore[arg-type]


@given(*sizes, st.integers(0, 30))
def test_without_shuffling_each_epoch_is_the_data_set_as_it_lies(
    samples: int, batch_size: int, replicas: int, seed: int, k: int
) -> None:
    order = DataOrder(samples, batch_size, replicas, seed, shuffle=False)
    rounds, whole = order.rounds_per_epoch(0), batch_size * replicas
    expected = list(range(samples))[k % rounds * whole : (k % rounds + 1) * whole]
    assert np.concatenate([order.batch(replica, k) for replica in range(replicas)]).tolist() == expected


def test_disjoint_subsets_as_they_lie_are_pieces_of_the_data_set() -> None:
    order = DataOrder(samples=10, batch_size=2, replicas=3, seed=5, partition="disjoint", shuffle=False)
    batches = [[order.batch(replica, k).tolist() for k in range(2)] for replica in range(3)]
    assert batches == [[[0, 1], [2, 3]], [[4, 5], [6]], [[7, 8], [9]]]
    assert order.batch(0, 2).tolist() == [0, 1]


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("shuffle", [True, False])
@given(*sizes, st.integers(0, 3))
def test_with_the_last_round_dropped_all_batches_are_full(
    partition: Partition, shuffle: bool, samples: int, batch_size: int, replicas: int, seed: int, epoch: int
) -> None:
    """And an epoch is the beginning of the one that keeps it, as far as batches are full."""
    samples += replicas * batch_size
    order = DataOrder(samples, batch_size, replicas, seed, partition, shuffle=shuffle, drop_last=True)
    kept = DataOrder(samples, batch_size, replicas, seed, partition, shuffle=shuffle)
    used = epoch_of(order, epoch)
    assert len(used) == len(set(used)) == order.epoch_samples <= samples == kept.epoch_samples
    for replica in range(replicas):
        rounds = order.rounds_per_epoch(replica)
        for k in range(rounds):
            batch = order.batch(replica, epoch * rounds + k)
            assert len(batch) == batch_size == order.size(replica, epoch * rounds + k)
            assert batch.tolist() == kept.batch(replica, epoch * kept.rounds_per_epoch(replica) + k).tolist()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_dropping_all_samples_is_refused(partition: Partition) -> None:
    with pytest.raises(InputError, match="drop_last=True leaves nothing of 10 samples for 3 replicas with batch_size"):
        DataOrder(10, 4, 3, 0, partition, drop_last=True)
    assert DataOrder(12, 4, 3, 0, partition, drop_last=True).epoch_samples == 12
