"""No step takes less and no worker holds less than the bounds say, whatever the option."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.planner.base import Arrangement, OverlapModel
from paceline.planner.cluster import Cluster
from paceline.planner.cost import in_flight
from paceline.planner.search.candidates import Frames, arrangement, frames, options
from paceline.planner.search.lower_bounds import flights
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import CostCache
from tests.planner.plain_workload import Plain, cluster

ROUNDED = 1 + 1e-9
"""Sums of the same numbers in another order."""

MIXED = st.lists(st.sampled_from((1.0, 1.0, 1.0, 5.0)), min_size=1, max_size=9).map(tuple)
BLOCKS = st.builds(lambda first, many: (first,) + (1.0,) * many, st.sampled_from((1.0, 4.0)), st.integers(1, 15))
WORKLOADS = st.builds(
    Plain,
    milliseconds=MIXED | BLOCKS,
    parameters=st.sampled_from((840, 8400)),  # whole for every number of shards
    saved_bytes=st.sampled_from((840, 16800)),
    output_bytes=st.sampled_from((1, 200)),
    fixed_ms=st.sampled_from((0.0, 0.7)),
    global_batch=st.sampled_from((4, 12)),
    alike=st.booleans(),
)
CLUSTERS = st.builds(
    cluster,
    hosts=st.sampled_from((1, 2)),
    per_host=st.sampled_from((2, 4)),
    bytes_per_s=st.sampled_from((1e4, 1e6, 1e9)),
)
CLUSTERS = st.builds(lambda on, shares: replace(on, shares_memory=shares and on.hosts == 1), CLUSTERS, st.booleans())
HABITS = st.builds(
    OverlapModel,
    overlap=st.sampled_from((0.0, 0.6)),
    send_overlap=st.sampled_from((0.0, 0.8)),
    step_s=st.sampled_from((0.0, 1e-3)),
    micro_batch_s=st.sampled_from((0.0, 1e-3)),
    context_bytes=st.sampled_from((0.0, 1e4)),
    fragmentation=st.sampled_from((1.0, 1.3)),
)


@settings(max_examples=100)
@given(WORKLOADS, CLUSTERS, HABITS, st.data())
def test_nothing_is_below_its_bounds(
    workload: Plain, on: Cluster, overlap_model: OverlapModel, data: st.DataObject
) -> None:
    known, asked, tried = CostCache(workload, on, overlap_model), Objectives(unbuilt=True), 0
    rows = known.frame_bounds(workload.global_batch, asked)
    for place in data.draw(st.lists(st.integers(0, len(rows.frames) - 1), min_size=10, max_size=10)):
        frame = rows.frames.at(place)
        for option in options(frame, known.cluster, asked):
            made = arrangement(frame, option, known.cluster, asked)
            if made is None or workload.refusal(made) is not None or not known.divisions.fits(made):
                continue
            closed, tried = known.cost(made), tried + 1
            step_s, held = known.bounds.step_s(frame, option), known.bounds.memory_bytes(frame, option)
            assert max(rows.step_s[place], step_s) <= closed.step_s * ROUNDED
            assert max(rows.memory_bytes[place], held) <= closed.peak.total * ROUNDED
    assume(tried)


@given(
    st.sampled_from((("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 3))),
    st.integers(2, 9),
    st.integers(1, 30),
)
def test_flights_are_those_of_what_is_held(kind: tuple[str, int], stages: int, micro_batches: int) -> None:
    schedule, chunks = kind
    made = Arrangement(stages=stages, chunks=chunks, schedule=schedule, micro_batches=micro_batches)
    each = list(in_flight(made))
    found = flights(schedule, chunks, stages, (), micro_batches)
    assert (found.least, found.most) == (min(each), max(each))
    assert abs(found.others + found.most - sum(each)) < 1e-9  # a few tens, summed in another order
    assert abs(found.shares - sum(1 / f for f in each)) < 1e-9


@given(WORKLOADS, CLUSTERS, st.integers(1, 8))
def test_frames_of_fewer_workers_are_among_those_of_all(workload: Plain, on: Cluster, workers: int) -> None:
    """Which is why they are bounded once for all."""
    workers, batch = min(workers, on.workers), workload.global_batch
    rows = CostCache(workload, on).frame_bounds(batch, Objectives())
    fewer = frames(workload, on, Objectives(workers=workers), batch)
    kept = [rows.frames.at(place) for place in range(len(rows.frames)) if rows.workers[place] <= workers]
    assert kept == _all(fewer)


def _all(found: Frames) -> list[object]:
    return [found.at(place) for place in range(len(found))]
