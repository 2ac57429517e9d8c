"""Pipelines that never run empty, beside what their schedules do."""

import random
from collections.abc import Iterator
from math import lcm

import pytest

from paceline.planner.stage_division import ASYNC_SCHEDULES, staleness, steady_micro_batch_s, weight_versions
from paceline.schedule import StageTimes, parse, timeline

CASES = 40


def cases(seed: int) -> Iterator[tuple[list[int], list[int], int]]:
    """Nanoseconds that each stage takes forward and backward, and a message."""
    rng = random.Random(seed)
    for _ in range(CASES):
        p = rng.randint(2, 6)
        forward, backward = ([2 * rng.randint(1, 10**5) for _ in range(p)] for _ in range(2))
        yield forward, backward, rng.choice((0, rng.randint(1, 10**5)))


def simulated_s(forward: list[int], backward: list[int], hop: int) -> float:
    """Once it is under way; a pipeline of p repeats itself after a number of micro-batches that divides this one."""
    p = len(forward)
    again, half = lcm(*range(1, p + 1)), [each / 2e9 for each in backward]
    times = StageTimes(tuple(each / 1e9 for each in forward), tuple(half), tuple(half), hop / 1e9)
    last, run = p - 1, timeline(parse("pipedream"), times, p, 60 * p + 2 * again)
    ends = [each.end_ns for each in run if each.worker == last and each.action.kind == "backward"]
    return (ends[-1 - 2 * p] - ends[-1 - 2 * p - again]) / again / 1e9


def test_a_micro_batch_takes_the_longest_round_trip() -> None:
    for forward, backward, hop in cases(1):
        busy_s = [(f + b) / 1e9 for f, b in zip(forward, backward, strict=True)]
        # Whole nanoseconds on both sides: what is left is the rounding of sums.
        assert steady_micro_batch_s(busy_s, hop / 1e9) == pytest.approx(simulated_s(forward, backward, hop), rel=1e-9)


@pytest.mark.parametrize(("schedule", "m"), [("pipedream", 1), ("pipedream-2bw", 7)])
@pytest.mark.parametrize("p", [2, 3, 7])
def test_versions_and_their_age_are_what_the_schedule_says(schedule: str, m: int, p: int) -> None:
    order = parse(schedule).resolved(m)
    for j in range(p):
        begun, updates, most, oldest = dict[int, int](), 0, 0, 0
        for action in order.actions(j, p, 12 * p * m):
            if action.kind == "forward":
                begun[action.micro_batch] = order.version(action.micro_batch, j, p)
            elif action.kind == "backward":
                used = begun.pop(action.micro_batch)
            else:
                oldest, updates = max(oldest, updates - used), updates + 1
            most = max(most, len({*begun.values(), updates}))
        assert (most, oldest) == (weight_versions(schedule, p, j), weight_versions(schedule, p, j) - 1)


def test_all_others_have_one_version() -> None:
    assert {weight_versions(each, 4, 0) for each in ("1f1b", "gpipe", "zero-bubble")} == {1}
    assert {each for each in ("1f1b", "gpipe", "pipedream", "pipedream-2bw") if not parse(each).flushes} == {
        *ASYNC_SCHEDULES
    }


def test_staleness_is_a_mean_over_elements() -> None:
    assert staleness("pipedream", [30, 10, 60]) == pytest.approx((30 * 2 + 10 * 1) / 100)
