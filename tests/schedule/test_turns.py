"""Columns that take turns at the stages of a pipeline: who does what, that nobody waits for ever, and what it gains."""

from collections.abc import Sequence
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.mesh import Coordinate, Mesh, StageReplica, StageReplicas
from paceline.schedule import Action, Dependencies, Schedule, StageTimes, in_flight, names, parse, simulate, timeline
from paceline.schedule.check import walk
from tests.schedule.schedule_values import TEXTS

TURNS = [text for text in TEXTS if parse(text).allows_stage_replicas]

CHECK = settings(max_examples=60, deadline=None)

columns_of = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple).map(StageReplicas)


def length(text: str, times: StageTimes, micro_batches: int, copies: Sequence[int]) -> float:
    """Of a step, in seconds."""
    spans = simulate(parse(text), times, times.parts, micro_batches, StageReplicas(tuple(copies)))
    return max(span.end_ns for span in spans) / 1e9


def orders(schedule: Schedule, columns: StageReplicas, micro_batches: int) -> list[list[Action]]:
    return [list(schedule.stage_replica_actions(column, columns, micro_batches)) for column in columns]


def test_who_takes_turns() -> None:
    assert {"1f1b", "gpipe", "sequential"} <= set(TURNS) < set(names())
    assert not any(
        parse(text).allows_stage_replicas for text in ("zero-bubble", "interleaved", "pipedream", "pipedream-2bw")
    )


@CHECK
@given(columns_of, st.integers(0, 50))
def test_columns_are_numbered_stage_by_stage(columns: StageReplicas, i: int) -> None:
    assert [columns.number(column) for column in columns] == list(range(len(columns)))
    assert list(map(columns.at, range(len(columns)))) == list(columns)
    for stage, count in enumerate(columns.copies):
        assert columns.at(columns.processing(stage, i)) == StageReplica(stage, i % count)
        assert list(columns.of_stage(stage)) == [columns.number(StageReplica(stage, copy)) for copy in range(count)]


@CHECK
@given(columns_of, st.integers(1, 3), st.integers(1, 2))
def test_each_rank_is_one_shard_of_one_column(columns: StageReplicas, shards: int, replicas: int) -> None:
    mesh = Mesh(replicas, tuple(n * shards for n in columns.copies), columns.copies)
    ranks = [rank for r in range(replicas) for column in columns for rank in mesh.stage_replica_ranks(r, column)]
    assert ranks == list(range(mesh.workers))
    for rank in ranks:
        place = mesh.coordinate(rank)
        assert mesh.stage_replica_ranks(place.replica, mesh.stage_replica(place))[mesh.shard(place)] == rank


def test_one_column_at_each_stage_is_the_mesh_as_it_was() -> None:
    mesh = Mesh(2, (2, 1))
    assert [mesh.shard(mesh.coordinate(rank)) for rank in range(6)] == [0, 1, 0, 0, 1, 0]
    assert {mesh.stage_replica(mesh.coordinate(rank)).copy for rank in range(6)} == {0}
    assert mesh.stage_replica(Coordinate(1, 1)) == StageReplica(1, 0)


@pytest.mark.parametrize("text", TURNS)
@CHECK
@given(columns_of, st.integers(1, 24), st.data())
def test_each_does_its_own_once_and_nobody_waits_for_ever(
    text: str, columns: StageReplicas, m: int, data: st.DataObject
) -> None:
    """Also where the last micro-batches are left out, for a batch that is too small for all."""
    kept = data.draw(st.integers(1, m))
    each = [[a for a in order if a.micro_batch < kept] for order in orders(parse(text), columns, m)]
    for column, order in zip(columns, each, strict=True):
        own = range(column.copy, kept, columns.copies[column.stage])
        due = [Action(column.stage, kind, i) for i in own for kind in ("forward", "backward")]
        assert sorted(map(str, order)) == sorted(map(str, due))
    done = list(walk([iter(order) for order in each], Dependencies.chain(len(columns.copies))))
    assert len(done) == 2 * kept * len(columns.copies)


@pytest.mark.parametrize("text", TURNS)
@CHECK
@given(st.integers(1, 5), st.integers(1, 12))
def test_one_column_at_each_stage_is_the_schedule_as_it_was(text: str, p: int, m: int) -> None:
    schedule, columns = parse(text), StageReplicas((1,) * p)
    assert orders(schedule, columns, m) == [list(schedule.actions(worker, p, m)) for worker in range(p)]


@CHECK
@given(columns_of, st.integers(1, 60))
def test_what_a_column_holds_under_1f1b(columns: StageReplicas, m: int) -> None:
    """All of a stage together: what the next holds, and one for each of its own; and no more than it is given."""
    window = 0
    for stage, count in reversed(list(enumerate(columns.copies))):
        held = in_flight(parse("1f1b"), stage, len(columns.copies), 1000, columns)
        assert window + count <= held * count < window + 2 * count
        assert in_flight(parse("1f1b"), stage, len(columns.copies), m, columns) == min(held, -(-m // count))
        window = held * count


seconds = st.integers(1, 9).map(float)


@st.composite
def slow_stages(draw: st.DrawFn) -> tuple[StageTimes, StageReplicas]:
    """Stages that take some time for forward, twice that for backward, and some columns at each."""
    columns = draw(columns_of)
    forward = tuple(draw(seconds) for _ in columns.copies)
    return StageTimes(forward, forward, forward), columns


@CHECK
@given(slow_stages(), st.integers(1, 40))
def test_a_step_lasts_as_long_as_the_busiest_column_and_the_way_through(
    case: tuple[StageTimes, StageReplicas], m: int
) -> None:
    """With all forward first, forward: a row of stages of n_s columns each; then the same back."""
    times, columns = case
    parts = len(columns.copies)
    lasts = length("gpipe", times, m, columns.copies)
    busiest = max(-(-m // n) * 3 * f for n, f in zip(columns.copies, times.forward, strict=True))
    way = 3 * sum(times.forward)
    assert max(busiest, way) <= lasts <= busiest * parts + way


@CHECK
@given(st.sampled_from(["gpipe", "1f1b"]), columns_of, st.integers(1, 12), seconds)
def test_stages_that_take_n_times_the_time_with_n_columns_keep_the_pace(
    text: str, columns: StageReplicas, rounds: int, second: float
) -> None:
    """PipeDream's load balance: but for the way through, a step is as long as if all stages took the same."""
    copies = columns.copies
    m = lcm(*copies) * rounds
    forward = tuple(second * n for n in copies)
    times = StageTimes(forward, forward, forward)
    ideal, way = 3 * second * m, 3 * sum(forward)
    assert ideal <= length(text, times, m, copies) <= ideal + 2 * way
    assert length(text, times, m, (1,) * len(copies)) >= max(copies) * ideal


@pytest.mark.parametrize(("m", "alone", "turns"), [(8, 49.0, 30.0), (64, 385.0, 198.0), (512, 3073.0, 1542.0)])
def test_twice_the_time_and_twice_the_workers(m: int, alone: float, turns: float) -> None:
    """The gain goes to 2 with m: the first stage is then no slower than the second."""
    times = StageTimes((2.0, 1.0), (2.0, 1.0), (2.0, 1.0))
    assert (length("1f1b", times, m, (1, 1)), length("1f1b", times, m, (2, 1))) == (alone, turns)
    assert (alone, turns) == (6 * m + 1, 3 * m + 6)


def test_spans_say_which_of_a_stage() -> None:
    spans = simulate(parse("1f1b"), StageTimes.equal(2), 2, 3, StageReplicas((1, 2)))
    assert {(s.stage, s.shard, s.micro_batch) for s in spans} == {
        *((0, 0, i) for i in range(3)),
        *((1, i % 2, i) for i in range(3)),
    }
    found = list(timeline(parse("1f1b"), StageTimes.equal(2), 2, 3, StageReplicas((1, 2))))
    assert {each.worker for each in found} == {0, 1, 2}
