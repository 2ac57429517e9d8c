"""What planning takes for granted of schedules, for 200 random (p, m) each: times to 1e-9, counts exactly.

p stages, m micro-batches, v chunks on a worker, f and b what a stage takes forward and backward, c = f + b.
"""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from paceline.core.mesh import StageReplicas
from paceline.planner.base import Arrangement
from paceline.planner.cost import bubble_s
from paceline.planner.cost import in_flight as predicted_in_flight
from paceline.planner.stage_division import Stage, busiest
from paceline.schedule import Schedule, StageTimes, in_flight, parse, timeline

PAIRS = 200
EXACT = 1e-9
"""Relative. Simulated times are whole nanoseconds, as those drawn here are: only the division into seconds rounds."""

Case = tuple[int, int, int, int]
"""p, m, f and b, the times in nanoseconds."""


def drawn(seed: int, *, whole_rounds: bool = False, filled: bool = False) -> list[Case]:
    """So many of them; m a multiple of p, or at least p."""
    rng = random.Random(seed)
    found = list[Case]()
    for _ in range(PAIRS):
        p = rng.randint(1, 12)
        m = p * rng.randint(1, 4) if whole_rounds else rng.randint(p if filled else 1, 32)
        found.append((p, m, rng.randint(1, 10**6), 2 * rng.randint(1, 10**6)))
    return found


def times(parts: int, forward_ns: float, backward_ns: float) -> StageTimes:
    """Gradients of inputs and of weights take half of backward each."""
    half = backward_ns / 2e9
    return StageTimes.equal(parts, forward=forward_ns / 1e9, backward_input=half, backward_weight=half)


def makespan_s(schedule: Schedule, times: StageTimes, p: int, m: int, columns: StageReplicas | None = None) -> float:
    return max(each.end_ns for each in timeline(schedule, times, p, m, columns)) / 1e9


def arranged(text: str, p: int, m: int, v: int = 1, copies: tuple[int, ...] = ()) -> Arrangement:
    return Arrangement(stages=p, micro_batches=m, schedule=text.partition(":")[0], chunks=v, copies=copies)


def row(forward_s: Sequence[float], backward_s: Sequence[float]) -> list[Stage]:
    return [Stage(f, b, 0.0, 1, 1, 1, 1) for f, b in zip(forward_s, backward_s, strict=True)]


def planned_s(stages: Sequence[Stage], arrangement: Arrangement) -> float:
    """What the busiest stage computes, and the bubble: what a plan says of a step without messages."""
    most = busiest(stages, arrangement)
    return arrangement.own_micro_batches(most) * stages[most].seconds + bubble_s(stages, arrangement)


# -------------------------------------------------------------------------------------------------- times, equal stages


@pytest.mark.parametrize("text", ["gpipe", "1f1b"])
def test_filling_and_emptying_takes_p_minus_1_micro_batches(text: str) -> None:
    for p, m, f, b in drawn(1):
        c_s = (f + b) / 1e9
        assert makespan_s(parse(text), times(p, f, b), p, m) == pytest.approx((m + p - 1) * c_s, rel=EXACT)
        assert planned_s(row([f / 1e9] * p, [b / 1e9] * p), arranged(text, p, m)) == pytest.approx(
            (m + p - 1) * c_s, rel=EXACT
        )


def test_one_after_the_other_takes_p_times_m() -> None:
    for p, m, f, b in drawn(2):
        whole_s = p * m * (f + b) / 1e9
        assert makespan_s(parse("sequential"), times(p, f, b), p, m) == pytest.approx(whole_s, rel=EXACT)
        planned = planned_s(row([f / 1e9] * p, [b / 1e9] * p), arranged("sequential", p, m))
        assert planned == pytest.approx(whole_s, rel=EXACT)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_the_bubble_of_interleaved_parts(v: int) -> None:
    """(p - 1) / (v · m) of the time that is computed; f and b are those of a part."""
    for p, m, f, b in drawn(v, whole_rounds=True):
        busy_s = m * v * (f + b) / 1e9
        found = makespan_s(parse(f"interleaved:chunks={v}"), times(p * v, f, b), p, m)
        assert found / busy_s - 1 == pytest.approx((p - 1) / (v * m), rel=EXACT, abs=EXACT)
        planned = planned_s(row([v * f / 1e9] * p, [v * b / 1e9] * p), arranged("interleaved", p, m, v))
        assert planned == pytest.approx(found, rel=EXACT)


def test_the_bubble_of_zero_bubble() -> None:
    """(p - 1) · max(F, I) for I = W = b / 2, and (p - m) · min(F, I) more where m < p."""
    for p, m, f, b in drawn(5):
        waits_s = ((p - 1) * max(f, b / 2) + max(0, p - m) * min(f, b / 2)) / 1e9
        found = makespan_s(parse("zero-bubble"), times(p, f, b), p, m)
        assert found == pytest.approx(m * (f + b) / 1e9 + waits_s, rel=EXACT)
        planned = planned_s(row([f / 1e9] * p, [b / 1e9] * p), arranged("zero-bubble", p, m))
        assert planned == pytest.approx(found, rel=EXACT)


def test_the_bubble_of_zero_bubble_where_both_halves_differ() -> None:
    """(p - 1) · max(F, I, F + I - W) for m ≥ p."""
    rng = random.Random(6)
    for p, m, f, b in drawn(6, filled=True):
        inputs = rng.randint(1, b)
        split = StageTimes.equal(p, forward=f / 1e9, backward_input=inputs / 1e9, backward_weight=(b - inputs) / 1e9)
        waits_s = (p - 1) * max(f, inputs, f + inputs - (b - inputs)) / 1e9
        assert makespan_s(parse("zero-bubble"), split, p, m) == pytest.approx(m * (f + b) / 1e9 + waits_s, rel=EXACT)


# ---------------------------------------------------------------------------------------------------------- in flight


@pytest.mark.parametrize("text", ["gpipe", "1f1b", "sequential", "zero-bubble"])
def test_what_a_plan_says_is_in_flight_is_what_the_schedule_holds(text: str) -> None:
    for p, m, _, _ in drawn(7):
        held = [in_flight(parse(text), stage, p, m) for stage in range(p)]
        assert list(predicted_in_flight(arranged(text, p, m))) == held
        known = {"gpipe": [m] * p, "1f1b": [min(p - stage, m) for stage in range(p)], "sequential": [1] * p}
        assert held == known.get(text, [min(p, m)] * p)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_what_interleaved_parts_hold(v: int) -> None:
    """Activations of 2 (p - 1 - s) + (v - 1) p + 1 parts, each of 1 / v of a stage; never more than v · m."""
    for p, m, _, _ in drawn(v, whole_rounds=True):
        for stage in range(p):
            held = in_flight(parse(f"interleaved:chunks={v}"), stage, p, m)
            assert held == min(v * m, 2 * (p - 1 - stage) + (v - 1) * p + 1)
            assert predicted_in_flight(arranged("interleaved", p, m, v))[stage] * v == pytest.approx(held, abs=1e-9)


@pytest.mark.parametrize("text", ["gpipe", "1f1b", "sequential"])
def test_what_those_hold_who_take_turns(text: str) -> None:
    rng = random.Random(8)
    for p, m, _, _ in drawn(8):
        copies = tuple(rng.randint(1, 4) for _ in range(p))
        held = [in_flight(parse(text), stage, p, m, StageReplicas(copies)) for stage in range(p)]
        assert list(predicted_in_flight(arranged(text, p, m, copies=copies))) == held


# ------------------------------------------------------------------------------------------------ times, unequal stages


def uneven(seed: int, spread: float) -> list[tuple[int, int, list[float]]]:
    """p, m and what a stage takes forward: 1 to ``spread``; backward takes twice that."""
    rng = random.Random(seed)
    return [(p, m, [rng.uniform(1, spread) for _ in range(p)]) for p, m, _, _ in drawn(seed)]


def errors(text: str, spread: float) -> list[float]:
    """(planned - simulated) / simulated."""
    found = list[float]()
    for p, m, forward in uneven(9, spread):
        split = StageTimes(*(tuple(forward),) * 3)
        planned = planned_s(row(forward, [2 * f for f in forward]), arranged(text, p, m))
        found.append(planned / makespan_s(parse(text), split, p, m) - 1)
    return found


@pytest.mark.parametrize("spread", [1.1, 1.5, 3.0])
@pytest.mark.parametrize("text", ["gpipe", "sequential"])
def test_plans_of_uneven_stages_that_wait_for_each_other_are_exact(text: str, spread: float) -> None:
    """Where backward is proportional to forward one stage is the slowest both ways: Σ c + (m - 1) max c."""
    assert max(map(abs, errors(text, spread))) < 1e-7  # each of some hundred times is rounded to a nanosecond of 1 s


@pytest.mark.parametrize("text", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("spread", "mean", "worst"), [(1.1, 0.005, 0.03), (1.5, 0.02, 0.11), (3.0, 0.04, 0.20)])
def test_plans_of_uneven_stages_are_a_little_off(text: str, spread: float, mean: float, worst: float) -> None:
    """Never too quick: backward of one micro-batch fills what forward of another leaves, which no equation sees."""
    found = errors(text, spread)
    assert min(found) > -1e-7  # rounded as above
    assert sum(found) / len(found) < mean
    assert max(found) < worst
    assert max(found) > 0.01  # it is an error: who wants less has to simulate


def taking_turns(text: str) -> list[float]:
    """(planned - simulated) / simulated where 1 to 3 take turns at stages that are about as many times as large."""
    rng, found = random.Random(10), list[float]()
    for p, m, shares in uneven(10, 1.3):
        copies = tuple(rng.randint(1, 3) for _ in range(p))
        forward = [share * count for share, count in zip(shares, copies, strict=True)]
        planned = planned_s(row(forward, [2 * f for f in forward]), arranged(text, p, m, copies=copies))
        simulated = makespan_s(parse(text), StageTimes(*(tuple(forward),) * 3), p, m, StageReplicas(copies))
        found.append(planned / simulated - 1)
    return found


@pytest.mark.parametrize(("text", "mean", "worst"), [("gpipe", 0.025, 0.1), ("1f1b", 0.025, 0.1)])
def test_plans_where_columns_take_turns_are_a_little_off(text: str, mean: float, worst: float) -> None:
    """The last micro-batch may have to wait for a column that is busy, while another of its stage is free."""
    found = [abs(error) for error in taking_turns(text)]
    assert sum(found) / len(found) < mean
    assert max(found) < worst


def test_uneven_stages_differ() -> None:
    """So that the above is no test of equal ones."""
    assert all(a != b for _, _, forward in uneven(9, 1.1) for a, b in pairwise(forward))
