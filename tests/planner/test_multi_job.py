"""Several models on the same workers: equal to trying every way to deal them out."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.planner.multi_job import SharedJob, partitions, shared
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search
from tests.planner.plain_workload import Plain, cluster


def best_of_all(jobs: list[SharedJob], workers: int) -> float:
    """Every job is dealt a group, every group a number of workers; a group takes turns."""
    took = {
        (place, count): search(job.workload, cluster(per_host=workers), Objectives(workers=count)).plans[0].cost.step_s
        for place, job in enumerate(jobs)
        for count in range(1, workers + 1)
    }
    found = []
    for groups in product(range(len(jobs)), repeat=len(jobs)):
        for counts in product(range(1, workers + 1), repeat=len(jobs)):
            used = set(groups)
            if sum(counts[group] for group in used) <= workers:
                ends = [0.0] * len(jobs)
                for place, group in enumerate(groups):
                    ends[group] += min(took[place, n] for n in range(1, counts[group] + 1)) * jobs[place].steps
                found.append(max(ends))
    return min(found)


JOBS = st.lists(
    st.builds(
        SharedJob,
        st.just("one"),
        st.builds(
            Plain,
            milliseconds=st.sampled_from(((1.0,), (2.0, 2.0), (5.0, 1.0, 1.0))),
            fixed_ms=st.sampled_from((0.0, 3.0)),
            global_batch=st.sampled_from((1, 4)),
        ),
        st.sampled_from((1, 2, 7)),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=10)
@given(JOBS, st.integers(1, 4))
def test_no_other_way_is_done_sooner(jobs: list[SharedJob], workers: int) -> None:
    found = shared(jobs, cluster(per_host=workers)).best
    assert found is not None
    assert found.seconds == pytest.approx(best_of_all(jobs, workers), rel=1e-9)  # the same few sums in another order
    assert sum(share.workers for share in found.shares) <= workers
    assert sorted(job for share in found.shares for job in share.jobs) == list(range(len(jobs)))


def test_models_that_gain_nothing_from_more_workers_are_split() -> None:
    alone = SharedJob("alone", Plain(milliseconds=(1.0,), global_batch=1, most_shards=1))
    found = shared([alone, alone], cluster(per_host=2))
    assert str(found.best) == "split"
    assert found.turns is not None
    assert found.turns.seconds == pytest.approx(2 * found.best.seconds)  # type: ignore[union-attr]


def test_models_that_gain_all_take_turns_or_do_as_well() -> None:
    """Twice the workers, half the time, with nothing to say to each other: turns and a split end together."""
    free = cluster(per_host=4, bytes_per_s=1e15, latency_s=0.0)
    job = SharedJob("free", Plain(parameters=0))
    found = shared([job, job], free)
    assert found.turns is not None
    assert found.split is not None
    assert found.turns.seconds == pytest.approx(found.split.seconds, rel=1e-6)  # messages of 10 bytes at 1e15 a second
    assert str(found.best) in ("turns", "split")


def test_a_model_that_fits_nowhere() -> None:
    found = shared([SharedJob("large", Plain(parameters=10**9)), SharedJob("small", Plain())], cluster())
    assert (found.best, found.turns, found.split) == (None, None, None)


def test_too_many() -> None:
    with pytest.raises(InputError, match="7 models, but 1 to 6"):
        shared([SharedJob("one", Plain())] * 7, cluster())


@given(st.integers(0, 6))
def test_partitions_are_all_there_are_each_once(count: int) -> None:
    """Bell's numbers."""
    found = [frozenset(map(frozenset, groups)) for groups in partitions(count)]
    assert len(found) == len(set(found)) == (1, 1, 2, 5, 15, 52, 203)[count]
