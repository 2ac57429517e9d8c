"""Branches side by side in simulated time, against drawings by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.mesh import StageReplicas
from paceline.schedule import Dependencies, Need, StageTimes, draw, parse, simulate, timeline
from tests.schedule.schedule_values import FLUSHING, cases

CHECK = settings(max_examples=60, deadline=None, derandomize=True)
S = 10**9

FORK = "0-1 0-2 1-3 2-3"
"""A trunk, two branches of one part, and what joins them."""

UNEVEN = "0-1 0-3 1-2 2-4 3-4 0>4"
"""A branch of two parts, a branch of one; the end needs a size of the trunk's."""

DRAWN = {
    ("gpipe", FORK, 2): """
worker 0|0F0 0F1  .   .   .   .   .   .  0B1 --- 0B0 ---
worker 1| .  1F0 1F1  .   .   .  1B1 --- 1B0 ---  .   .
worker 2| .  2F0 2F1  .   .   .  2B1 --- 2B0 ---  .   .
worker 3| .   .  3F0 3F1 3B1 --- 3B0 ---  .   .   .   .
24 of 48 cells are busy: 50 %""",
    ("1f1b", FORK, 4): """
worker 0|0F0 0F1 0F2 0F3  .   .   .  0B0 ---  .  0B1 ---  .  0B2 ---  .  0B3 ---
worker 1| .  1F0 1F1 1F2  .  1B0 --- 1F3 1B1 ---  .  1B2 ---  .  1B3 ---  .   .
worker 2| .  2F0 2F1  .   .  2B0 --- 2F2 2B1 --- 2F3 2B2 ---  .  2B3 ---  .   .
worker 3| .   .  3F0 3B0 --- 3F1 3B1 --- 3F2 3B2 --- 3F3 3B3 ---  .   .   .   .
48 of 72 cells are busy: 67 %""",
    ("gpipe", UNEVEN, 1): """
worker 0|0F0  .   .   .   .   .   .   .   .   .  0B0 ---
worker 1| .  1F0  .   .   .   .   .   .  1B0 ---  .   .
worker 2| .   .  2F0  .   .   .  2B0 ---  .   .   .   .
worker 3| .  3F0  .   .   .   .  3B0 ---  .   .   .   .
worker 4| .   .   .  4F0 4B0 ---  .   .   .   .   .   .
15 of 60 cells are busy: 25 %""",
}


@pytest.mark.parametrize(("schedule", "needs", "m"), DRAWN)
def test_drawn_by_hand(schedule: str, needs: str, m: int) -> None:
    found = Dependencies.parse(parts_of(needs), needs)
    assert draw(parse(schedule), found.parts, m, None, found) == DRAWN[schedule, needs, m].strip()


def parts_of(needs: str) -> int:
    return 1 + max(int(word[-1]) for word in needs.split())


def test_what_has_no_gradient_is_not_waited_for() -> None:
    """Part 0 only sends a size: its backward comes before that of part 1, if a part of its own can have one."""
    needs = Dependencies.parse(2, "0>1")
    found = {str(t.action): t.start_ns // S for t in timeline(parse("gpipe"), StageTimes.equal(2), 2, 1, None, needs)}
    assert found == {"0F0": 0, "0B0": 1, "1F0": 1, "1B0": 2}


def test_a_value_travels_once_to_each_who_needs_it() -> None:
    """It comes to part 2 straight from part 0, not by way of part 1."""
    times = StageTimes.equal(3, forward=1 / S, backward_input=1 / S, backward_weight=0.0, transfer=10 / S)
    needs = Dependencies.parse(3, "0-1 0-2 1-2")
    found = {str(t.action): t.start_ns for t in timeline(parse("gpipe"), times, 3, 1, None, needs)}
    assert found == {"0F0": 0, "1F0": 11, "2F0": 22, "2B0": 23, "1B0": 34, "0B0": 45}


def test_those_who_take_turns_at_a_branch() -> None:
    """One branch takes twice the time of the other, with two who take turns at it::

    part 0   |F0F1F2F3                  B3--B2--B1--B0--|
    part 1.0 |  F0--F2--            B2------B0------    |
    part 1.1 |    F1--F3--      B3------B1------        |
    part 2   |  F0F1F2F3        B3--B2--B1--B0--        |
    part 3   |      F0F1F2F3B3--B2--B1--B0--            |
    """
    times = StageTimes((1.0, 2.0, 1.0, 1.0), (1.0, 2.0, 1.0, 1.0), (1.0, 2.0, 1.0, 1.0))
    spans = simulate(parse("gpipe"), times, 4, 4, StageReplicas((1, 2, 1, 1)), Dependencies.parse(4, FORK))
    ends = {(s.stage, s.shard, s.action, s.micro_batch): s.end_ns // S for s in spans}
    assert [ends[1, i % 2, "forward", i] for i in range(4)] == [3, 4, 5, 6]
    assert [ends[3, 0, "forward", i] for i in range(4)] == [4, 5, 6, 7]
    assert [ends[1, i % 2, "backward", i] for i in range(4)] == [19, 17, 15, 13]
    assert [ends[0, 0, "backward", i] for i in range(4)] == [21, 19, 17, 15]


@st.composite
def graphs(draw_: st.DrawFn, parts: int) -> Dependencies:
    """Each part needs some of those before it."""
    needs: list[Need] = []
    for part in range(1, parts):
        sources = draw_(st.sets(st.integers(0, part - 1), min_size=1, max_size=3))
        needs += [Need(source, part) for source in sources]
    return Dependencies.of(parts, needs)


def depth(needs: Dependencies) -> int:
    """Of the longest way through the parts."""
    found: list[int] = []
    for part in range(needs.parts):
        found.append(1 + max((found[source] for source in needs.sources(part)), default=0))
    return max(found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@CHECK
@given(st.data(), st.integers(1, 8), st.integers(1, 16))
def test_a_step_is_as_long_as_that_of_a_chain_as_deep(schedule: str, data: st.DataObject, p: int, m: int) -> None:
    """Warm-up counts that are meant for a chain make nobody wait."""
    found = timeline(parse(schedule), StageTimes.equal(p), p, m, None, needs := data.draw(graphs(p)))
    assert max(each.end_ns for each in found) == (m + depth(needs) - 1) * 3 * S


@pytest.mark.parametrize("schedule", FLUSHING)
@CHECK
@given(st.data())
def test_nothing_begins_later_than_in_a_chain(schedule: str, data: st.DataObject) -> None:
    order, p, m = data.draw(cases(schedule, workers=5, micro_batches=8))
    parts = order.parts(p)
    each = st.tuples(*[st.integers(0, 9).map(lambda ns: ns / S)] * parts)
    times = StageTimes(*(data.draw(each) for _ in range(3)), transfer=data.draw(st.integers(0, 3)) / S)
    chain, found = (
        {t.action: t.start_ns for t in timeline(order, times, p, m, None, needs)}
        for needs in (None, data.draw(graphs(parts)))
    )
    assert all(found[action] <= start for action, start in chain.items())


@CHECK
@given(st.integers(1, 6).flatmap(graphs))
def test_they_are_read_as_they_are_printed(needs: Dependencies) -> None:
    assert Dependencies.parse(needs.parts, str(needs)) == needs


def test_one_gradient_that_goes_back_is_enough() -> None:
    assert str(Dependencies.of(2, [Need(0, 1, False), Need(0, 1, True), Need(0, 1, False)])) == "0-1"


@pytest.mark.parametrize(
    ("parts", "text", "said"),
    [
        (2, "1-0", "part 0 of 2 can't need part 1; write parts from 0 to 1, the one that is needed first"),
        (2, "1-2", "part 2 of 2 can't need part 1"),
        (2, "0+1", r"'0\+1' does not say which parts need which; write 0-1 1>2, say"),
    ],
)
def test_what_can_not_be(parts: int, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Dependencies.parse(parts, text)


def test_dependencies_of_another_cut() -> None:
    with pytest.raises(InputError, match="dependencies of 2 parts, but stages=3 makes 3; write 3 of each"):
        simulate(parse("gpipe"), StageTimes.equal(3), 3, 1, None, Dependencies.chain(2))
