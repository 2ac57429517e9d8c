"""What holds for every schedule, for any p up to 16 and m up to 64."""

import inspect
import pickle
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.registry import registered
from paceline.schedule import Schedule, check, draw, in_flight, names, parse
from tests.schedule.schedule_values import FLUSHING, STREAMING, TEXTS, cases

CHECK = settings(max_examples=25, deadline=None, derandomize=True)
HUGE = 10**15

DRAWN = {"sequential": (3, 2), "interleaved": (2, 4), "pipedream-2bw": (2, 6)}
"""p and m of the table in the docstring, where they are not 3 and 4."""


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_complete_and_free_of_deadlock(text: str, data: st.DataObject) -> None:
    assert check(*data.draw(cases(text))) is None


@pytest.mark.parametrize("text", FLUSHING)
@CHECK
@given(st.data())
def test_micro_batches_may_be_left_out(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text))
    left_out = data.draw(st.sets(st.integers(0, m - 1)))
    assert check(schedule, p, m, left_out) is None


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_one_worker_holds_all_parts_in_order(text: str, data: st.DataObject) -> None:
    schedule, p, _ = data.draw(cases(text))
    holders = [schedule.worker_of(part, p) for part in range(schedule.parts(p))]
    assert holders == list(range(p)) * schedule.chunks


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_no_more_is_held_than_there_is(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text))
    assert all(1 <= in_flight(schedule, worker, p, m) <= m * schedule.chunks for worker in range(p))


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_is_kept_of_what_is_to_come(text: str) -> None:
    schedule = parse(text).resolved(4)
    first = list(islice(schedule.actions(1, 4, HUGE), 500))
    assert len(first) == 500
    assert first == list(islice(schedule.actions(1, 4, HUGE), 500))


@pytest.mark.parametrize("text", STREAMING)
def test_how_long_a_stream_is_shows_at_its_end_alone(text: str) -> None:
    schedule = parse(text).resolved(4)
    long, short = (list(islice(schedule.actions(1, 4, m), 100)) for m in (HUGE, 100))
    assert long == short


@pytest.mark.parametrize("text", TEXTS)
@CHECK
@given(st.data())
def test_updates_are_those_of_a_stream(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text))
    for worker in range(p):
        updates = [a.micro_batch for a in schedule.actions(worker, p, m) if a.kind == "update"]
        assert bool(updates) is not schedule.flushes
        assert updates == sorted(set(updates))


@pytest.mark.parametrize("text", FLUSHING)
@CHECK
@given(st.data())
def test_weights_stay_until_the_flush(text: str, data: st.DataObject) -> None:
    schedule, p, m = data.draw(cases(text))
    assert {schedule.version(i, worker, p) for i in range(m) for worker in range(p)} == {0}


@pytest.mark.parametrize("text", names())
def test_drawn_where_it_is_written(text: str) -> None:
    schedule = parse(text).resolved(3)
    source = inspect.getmodule(type(schedule))
    assert source is not None
    assert source.__doc__ is not None
    table = draw(schedule, *DRAWN.get(text, (3, 4)))
    assert table.splitlines() == [line.strip() for line in source.__doc__.splitlines()[4 : 5 + table.count("\n")]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("workers", "micro_batches", "named"), [(0, 4, "stages=0"), (2, 0, "micro_batches=0")])
def test_nothing_can_be_done_with_none(text: str, workers: int, micro_batches: int, named: str) -> None:
    with pytest.raises(InputError, match=f"{named}, but it must be a whole number of at least 1; write"):
        parse(text).refuse(workers, micro_batches)


@pytest.mark.parametrize("text", TEXTS)
def test_values(text: str) -> None:
    schedule = parse(text)
    assert schedule == parse(text)
    assert hash(schedule) == hash(parse(text))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    fixed: Any = schedule
    with pytest.raises(AttributeError):
        fixed.chunks = 5


def test_every_schedule_has_a_name() -> None:
    def leaves(cls: type[Schedule]) -> set[type[Schedule]]:
        return {cls} if not cls.__subclasses__() else set().union(*map(leaves, cls.__subclasses__()))

    ours = {cls for cls in leaves(Schedule) if cls.__module__.startswith("paceline.")}
    assert ours == set(registered(Schedule).values())
