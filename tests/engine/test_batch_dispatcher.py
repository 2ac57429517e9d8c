"""Which batches replicas take: each of an epoch once, whoever dies, comes or goes, and wherever a run is broken off."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.data_order import BatchRange, DataOrder, DataPosition, Outstanding
from paceline.engine.batch_dispatcher import NO_BATCHES, BatchDispatcher
from paceline.engine.budget import Epochs, Steps, Unbounded
from tests.engine.weightless import Weightless

POLICIES = ["synchronous", "asynchronous", "stale-synchronous:bound=2", "buffered:k=2", "smooth-switch:every=3"]


def used(run: Weightless, order: DataOrder) -> Counter[int]:
    """Return how often each sample is in a Δ that was applied, or had no sample."""
    batches = [run.batches[a.replica, a.clock] for a in [*run.applied, *run.discarded]]
    return Counter(int(i) for b in batches for k in b.numbers for i in order.batch(b.stream, k))


def dispatcher(order: DataOrder, replicas: int, *, shared: bool = False, micro_steps: int = 1) -> BatchDispatcher:
    start = DataPosition(order, (0,) * order.replicas)
    return BatchDispatcher(Unbounded(micro_steps), start, () if shared else range(replicas))


@given(
    samples=st.integers(1, 40),
    batch=st.integers(1, 4),
    replicas=st.integers(2, 5),
    epochs=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    shared=st.booleans(),
    deaths=st.dictionaries(st.integers(0, 60), st.integers(0, 4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_an_epoch_is_exact_whoever_dies(
    samples: int, batch: int, replicas: int, epochs: int, policy: str, shared: bool, deaths: dict[int, int]
) -> None:
    """Replicas that share a stream never run ahead; nor do those of a synchronous run."""
    order = DataOrder(samples, batch, 1 if shared else replicas, 0)
    run = Weightless(
        policy,
        replicas,
        "exponential:mean=1",
        Epochs(epochs * samples, order, 1),
        samples=lambda r, k: sum(order.size(b.stream, n) for b in [run.batches[r, k + 1]] for n in b.numbers),
        order=order,
        parks=True,
    )
    # One of them lives, so that there is somebody to take what the others leave.
    run.carry(die={event: replica for event, replica in deaths.items() if 0 < replica < replicas})
    assert not run.coordinator.present
    counts = used(run, order)
    if shared or policy == "synchronous":
        assert counts == dict.fromkeys(range(samples), epochs)
    else:
        assert epochs * samples <= counts.total() < epochs * samples + batch


@given(
    samples=st.integers(1, 40),
    replicas=st.integers(1, 4),
    shared=st.booleans(),
    micro_steps=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from("TSLA"), st.integers(0, 3)), max_size=60),
    after=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_a_run_that_goes_on_takes_what_was_outstanding_once(
    samples: int, replicas: int, shared: bool, micro_steps: int, events: list[tuple[str, int]], after: int
) -> None:
    """T: takes, S: its Δ is settled, L: dies at work, A: dies, whatever it is at."""
    order = DataOrder(samples, 2, 1 if shared else replicas, 3)
    before = dispatcher(order, replicas, shared=shared, micro_steps=micro_steps)
    clocks, under_way = Counter[int](), dict[int, BatchRange]()
    dead, counts = set[int](), Counter[int]()

    def samples_of(batches: BatchRange) -> list[int]:
        return [int(i) for k in batches.numbers for i in order.batch(batches.stream, k)]

    for event, replica in events:
        if replica >= replicas or replica in dead:
            continue
        if event == "T" and replica not in under_way:
            clocks[replica] += 1
            under_way[replica] = batches = before.take(replica, clocks[replica])
            assert 0 < batches.size <= micro_steps
        elif event == "S" and replica in under_way:
            before.settled(replica, clocks[replica])
            counts.update(samples_of(under_way.pop(replica)))
        elif event == "L" and replica in under_way:
            before.lost(replica, clocks[replica])
            before.abandon(replica)
            del under_way[replica]
            dead.add(replica)
        elif event == "A" and replica not in under_way:
            before.abandon(replica)
            dead.add(replica)
    rest = DataOrder(samples, 3, after, 3, resumed=before.position)
    left, begun = DataPosition(rest, (0,) * after).left()
    counts.update(i for indices in left for i in indices.tolist())
    assert counts == Counter({i: begun for i in range(samples) if begun})


def test_a_replica_that_was_at_work_takes_the_same_again() -> None:
    order = DataOrder(12, 2, 2, 0)
    position = DataPosition(
        order, (2, 1), (Outstanding(BatchRange(1, 0, 1), 1, 1), Outstanding(BatchRange(0, 0, 1), None, 0))
    )
    again = BatchDispatcher(Unbounded(1), position, range(2))
    assert again.take(1, 2) == BatchRange(1, 0, 1)
    assert again.take(0, 3) == BatchRange(0, 0, 1), "what a dead replica has left belongs to an earlier epoch, or to it"
    assert [again.take(0, 4), again.take(1, 3)] == [BatchRange(0, 2, 1), BatchRange(1, 1, 1)]


def test_held_batches_are_neither_given_again_nor_lost() -> None:
    order = DataOrder(12, 2, 2, 0)
    held = Outstanding(BatchRange(0, 0, 1), 0, 1)
    again = BatchDispatcher(Unbounded(1), DataPosition(order, (1, 0)), range(2), [held])
    assert again.take(0, 2) == BatchRange(0, 1, 1)
    assert again.position.outstanding == (held, Outstanding(BatchRange(0, 1, 1), 0, 2))
    again.settled(0, 1)
    assert again.position.outstanding == (Outstanding(BatchRange(0, 1, 1), 0, 2),)


def test_what_a_dead_replica_has_left_of_an_epoch_comes_before_the_next_one() -> None:
    """Two streams of three batches an epoch: replica 1 takes one, dies at the second."""
    order = DataOrder(12, 2, 2, 0)
    both = dispatcher(order, 2)
    assert both.take(1, 1) == BatchRange(1, 0, 1)
    both.settled(1, 1)
    both.take(1, 2)
    both.lost(1, 2)
    both.abandon(1)
    assert [both.take(0, k) for k in range(1, 8)] == [
        *[BatchRange(0, k, 1) for k in range(3)],
        *[BatchRange(1, k, 1) for k in (1, 2)],
        BatchRange(0, 3, 1),
        BatchRange(0, 4, 1),
    ]


def test_a_budget_that_is_spent_gives_nothing_until_something_is_lost() -> None:
    order = DataOrder(4, 2, 1, 0)
    shared = BatchDispatcher(Epochs(4, order, 1), DataPosition(order, (0,)), ())
    assert [shared.take(r, 1) for r in range(3)] == [BatchRange(0, 0, 1), BatchRange(0, 1, 1), NO_BATCHES]
    assert shared.position.taken == (2,)
    shared.lost(0, 1)
    assert shared.take(2, 1) == BatchRange(0, 0, 1)


def test_one_that_joins_has_as_many_steps_left_as_the_others() -> None:
    quota = Steps([10, 10, 10], 1)
    for _ in range(6):
        quota.grant(0, BatchRange(0, 0, 1))
    quota.join(2, {0})
    assert [quota.guaranteed(r) for r in range(3)] == [4, 10, 4]


@pytest.mark.parametrize("batches", [BatchRange(0, 1, 2), BatchRange(3, 0, 1)])
def test_a_position_that_contradicts_itself_is_refused(batches: BatchRange) -> None:
    with pytest.raises(ValueError, match="were not given out"):
        DataPosition(DataOrder(12, 2, 2, 0), (2, 0), (Outstanding(batches, 0, 1),))
