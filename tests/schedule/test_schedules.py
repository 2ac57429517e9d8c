"""What each schedule promises for itself: activations, updates and their age, and what it refuses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.schedule import Schedule, in_flight, parse
from paceline.schedule.pipedream_2bw import PipeDream2BW
from tests.schedule.schedule_values import cases

CHECK = settings(max_examples=60, deadline=None, derandomize=True)
WORKERS, MICRO_BATCHES = st.integers(1, 16), st.integers(1, 64)


def order(schedule: Schedule, worker: int, workers: int, micro_batches: int) -> str:
    return " ".join(map(str, schedule.actions(worker, workers, micro_batches)))


def test_orders() -> None:
    assert order(parse("sequential"), 1, 3, 2) == "1F0 1B0 1F1 1B1"
    assert order(parse("gpipe"), 0, 2, 3) == "0F0 0F1 0F2 0B2 0B1 0B0"
    assert order(parse("1f1b"), 0, 2, 3) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert order(parse("1f1b"), 0, 4, 2) == "0F0 0F1 0B0 0B1"
    assert order(parse("interleaved"), 1, 2, 2) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert order(parse("interleaved"), 0, 1, 2) == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
    assert order(parse("zero-bubble"), 1, 2, 3) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert order(parse("pipedream"), 0, 2, 3) == "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert order(parse("pipedream-2bw").resolved(2), 1, 2, 5) == "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3 1F4 1B4"


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_activations_of_gpipe_grow_with_m(p: int, m: int) -> None:
    assert [in_flight(parse("gpipe"), worker, p, m) for worker in range(p)] == [m] * p


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_activations_of_1f1b_grow_with_p(p: int, m: int) -> None:
    assert [in_flight(parse("1f1b"), worker, p, m) for worker in range(p)] == [min(m, p - w) for w in range(p)]


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_activations_of_one_at_a_time(p: int, m: int) -> None:
    assert [in_flight(parse("sequential"), worker, p, m) for worker in range(p)] == [1] * p


@CHECK
@given(cases("interleaved") | cases("interleaved:chunks=3"))
def test_activations_of_interleaved_parts(case: tuple[Schedule, int, int]) -> None:
    schedule, p, m = case
    v = schedule.chunks
    held = [in_flight(schedule, worker, p, m) for worker in range(p)]
    assert held == [min(v * m, 2 * (p - 1 - w) + (v - 1) * p + 1) for w in range(p)]


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_zero_bubble_holds_no_more_than_1f1b(p: int, m: int) -> None:
    most = max(in_flight(parse("1f1b"), worker, p, m) for worker in range(p))
    assert [in_flight(parse("zero-bubble"), worker, p, m) for worker in range(p)] == [most] * p


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_zero_bubble_goes_on_with_gradients_of_inputs_as_1f1b_does(p: int, m: int) -> None:
    for worker in range(p):
        halved = [str(a) for a in parse("zero-bubble").actions(worker, p, m) if a.kind != "backward_weight"]
        assert halved == [str(a).replace("B", "I") for a in parse("1f1b").actions(worker, p, m)]


def versions(schedule: Schedule, worker: int, workers: int, micro_batches: int) -> tuple[list[int], list[int], int]:
    """For each micro-batch: the updates made before its forward, and before that which it is in; and the most versions
    of the weights that have to be kept at once, the newest among them."""
    before, within, updates, most = [0] * micro_batches, [-1] * micro_batches, 0, 0
    waiting: set[int] = set()  # forward done, backward to come
    pending: list[int] = []  # backward done, update to come
    for action in schedule.actions(worker, workers, micro_batches):
        i = action.micro_batch
        if action.kind == "forward":
            before[i] = updates
            waiting.add(i)
        elif action.kind == "backward":
            waiting.remove(i)
            pending.append(i)
        else:
            for each in pending:
                within[each] = updates
            pending.clear()
            updates += 1
        used = {schedule.version(each, worker, workers) for each in waiting}
        most = max(most, len(used | {updates}))
    return before, within, most


@CHECK
@given(WORKERS, MICRO_BATCHES)
def test_pipedream_is_as_stale_as_its_paper_says(p: int, m: int) -> None:
    schedule = parse("pipedream")
    for j in range(p):
        before, within, most = versions(schedule, j, p, m)
        assert [schedule.version(i, j, p) for i in range(m)] == before
        assert within == list(range(m))  # an update each
        assert [a - b for a, b in zip(within, before, strict=True)] == [min(i, p - 1 - j) for i in range(m)]
        assert most <= p - j
        assert most == p - j or m < 2 * (p - j) - 1  # as many as are in flight, once their forwards differ


@CHECK
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 5), st.integers(0, 15))
def test_pipedream_2bw_is_one_update_late_with_two_versions(p: int, more: int, batches: int, rest: int) -> None:
    m = p + more
    schedule = parse("pipedream-2bw").resolved(m)
    stream = batches * m + rest % m
    for j in range(p):
        before, within, most = versions(schedule, j, p, stream)
        wanted = [schedule.version(i, j, p) for i in range(stream)]
        assert wanted == [max(0, i // m - 1) for i in range(stream)]
        assert all(old <= made for old, made in zip(wanted, before, strict=True))  # it is there in time
        assert within[: batches * m] == [i // m for i in range(batches * m)]
        assert within[batches * m :] == [-1] * (stream - batches * m)
        assert most <= 2


def test_one_mini_batch_of_pipedream_2bw() -> None:
    assert PipeDream2BW().resolved(4) == PipeDream2BW(every=4)
    assert order(PipeDream2BW(), 1, 2, 2) == "1F0 1B0 1F1 1B1 1U1"
    assert PipeDream2BW().version(7, 0, 2) == 0


REFUSED = [
    (
        "interleaved",
        4,
        6,
        "micro_batches=6 is no multiple of stages=4, but interleaved parts take turns by 4 micro-batches each; "
        "write micro_batches=8, or schedule=1f1b.",
    ),
    (
        "pipedream-2bw",
        4,
        3,
        "micro_batches=3 is less than stages=4, but two versions of the weights take an update every 4 micro-batches "
        "or more; write micro_batches=4, or schedule=pipedream.",
    ),
]


@pytest.mark.parametrize(("text", "workers", "micro_batches", "message"), REFUSED)
def test_refused(text: str, workers: int, micro_batches: int, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(text).refuse(workers, micro_batches)


def test_one_worker_takes_any_number() -> None:
    parse("interleaved").refuse(1, 7)
    parse("pipedream-2bw").refuse(1, 1)


def test_pipedream_2bw_looks_at_its_mini_batch() -> None:
    with pytest.raises(InputError, match="micro_batches=2 is less than stages=4"):
        parse("pipedream-2bw").resolved(2).refuse(4, 100)
