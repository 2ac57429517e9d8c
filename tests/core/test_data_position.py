"""A run that goes on with other replicas and batches takes each sample of an epoch exactly once."""

import json
from collections import Counter

import numpy as np
import pytest

from paceline.core.data_order import DataOrder, DataPosition
from paceline.core.typed_json import of_json, to_json


def through_json(position: DataPosition) -> DataPosition:
    read: DataPosition = of_json(DataPosition, json.loads(json.dumps(to_json(position))), "a position")
    return read


@pytest.mark.parametrize("seed", range(60))
def test_each_sample_is_taken_once_an_epoch_however_often_the_split_changes(seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = int(random.integers(1, 40))

    def drawn(resumed: DataPosition | None) -> DataOrder:
        replicas, batch_size = int(random.integers(1, min(4, samples) + 1)), int(random.integers(1, 6))
        return DataOrder(samples, batch_size, replicas, 5, "global" if random.random() < 0.5 else "disjoint", resumed)

    used = Counter[int]()
    order = drawn(None)
    for _ in range(int(random.integers(1, 5))):
        taken = tuple(random.integers(0, 12, order.replicas).tolist())
        for replica, count in enumerate(taken):
            for k in range(count):
                batch = order.batch(replica, k)
                assert len(batch) == order.size(replica, k)
                used.update(batch.tolist())
        position = DataPosition(order, taken)
        assert through_json(position) == position
        order = drawn(through_json(position))
    left, begun = DataPosition(order, (0,) * order.replicas).left()
    used.update(i for indices in left for i in indices.tolist())
    assert used == Counter({i: begun for i in range(samples) if begun})


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 12), (2, 6), (4, 3), (6, 2)])
def test_with_the_same_global_batch_rounds_have_the_same_samples(replicas: int, batch_size: int) -> None:
    whole, stop = DataOrder(samples=50, batch_size=3, replicas=4, seed=1), 7
    order = DataOrder(50, batch_size, replicas, 1, resumed=DataPosition(whole, (stop,) * 4))
    for k in range(20):
        old = np.concatenate([whole.batch(replica, stop + k) for replica in range(4)])
        assert np.concatenate([order.batch(replica, k) for replica in range(replicas)]).tolist() == old.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_with_the_last_round_dropped_batches_stay_full_however_often_the_split_changes(seed: int) -> None:
    """And the samples of a position are whole epochs but for those that are left: a budget of epochs ends exactly."""
    random = np.random.default_rng(seed)

    def drawn(resumed: DataPosition | None) -> DataOrder:
        replicas, batch_size = int(random.integers(1, 4)), int(random.integers(1, 5))
        return DataOrder(30, batch_size, replicas, 5, resumed=resumed, drop_last=True, shuffle=bool(seed % 2))

    order = drawn(None)
    for _ in range(4):
        taken = tuple(random.integers(0, 12, order.replicas).tolist())
        batches = [order.batch(replica, k) for replica, count in enumerate(taken) for k in range(count)]
        assert {len(batch) for batch in batches} <= {order.batch_size}
        position = DataPosition(order, taken)
        if order.resumed is None:
            assert position.samples == sum(map(len, batches))
        before, order = position, drawn(through_json(position))
        start = DataPosition(order, (0,) * order.replicas)
        left, begun = start.left()
        assert sum(map(len, left)) % (order.replicas * order.batch_size) == 0
        assert begun == before.left()[1]
        rounds = order.batches_of_epoch(0, begun).start
        for replica in range(order.replicas):
            assert {len(order.batch(replica, k)) for k in range(rounds + 3)} == {order.batch_size}
