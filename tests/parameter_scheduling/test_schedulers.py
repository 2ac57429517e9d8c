"""Schedulers: what all of them keep to, and what each draws."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import InputError
from paceline.core.registry import family_of
from paceline.core.text_form import parse_value, text_of
from paceline.parameter_scheduling.schedulers import Cyclic, Priority, Scheduler, Uniform, balanced, independent

CHECK = settings(max_examples=60, deadline=None, derandomize=True)

FAMILY = family_of(Scheduler)
assert FAMILY is not None
ALL = sorted(name for name, entry in FAMILY.entries.items() if entry.cls.__module__.startswith("paceline."))


def parsed(text: str) -> Scheduler[Any]:
    found = parse_value(FAMILY, text)  # type: ignore[arg-type]
    assert isinstance(found, Scheduler)
    return found


@pytest.mark.parametrize("name", ALL)
@given(blocks=st.integers(1, 12), at_once=st.integers(1, 5), seed=st.integers(0, 99), rounds=st.integers(1, 6))
@CHECK
def test_all_propose_different_blocks_and_change_nothing(
    name: str, blocks: int, at_once: int, seed: int, rounds: int
) -> None:
    scheduler = parsed(f"{name}:at_once={at_once}")
    state = scheduler.start(blocks, seed)
    for number in range(rounds):
        first = scheduler.propose(state)
        assert len(set(first.tolist())) == len(first) == scheduler.looked_at(blocks) <= blocks
        assert set(first.tolist()) <= set(range(blocks))
        after = scheduler.updated(state, first[:at_once], np.full(len(first[:at_once]), 0.5 + number))
        assert np.array_equal(scheduler.propose(state), first), "state is passed, not changed"
        state = after


@pytest.mark.parametrize("name", ALL)
def test_all_have_a_text_form(name: str) -> None:
    scheduler = parsed(f"{name}:at_once=4,bound=none,candidates=9")
    assert (scheduler.at_once, scheduler.bound, scheduler.candidates) == (4, None, 9)
    assert parsed(text_of(scheduler)) == scheduler
    assert text_of(parsed(name)) == name


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("cyclic:at_once=0", "write cyclic:at_once=1"),
        ("uniform:bound=0", "write uniform:bound=0.1"),
        ("priority:at_once=4,candidates=3", "write priority:candidates=4"),
        ("priority:eta=0", "write priority:eta=0.01"),
        ("priority:power=-1", "write priority:power=1"),
        ("prority", "did you mean 'priority'"),
    ],
)
def test_refusals(text: str, instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        parsed(text)


def test_a_cycle_lets_those_that_waited_come_first() -> None:
    scheduler = Cyclic(at_once=2)
    state = scheduler.start(6, 0)
    assert scheduler.propose(state).tolist() == [0, 1, 2, 3]
    state = scheduler.updated(state, np.array([0, 2]), np.zeros(2))
    assert scheduler.propose(state).tolist() == [1, 3, 4, 5]


def test_a_cycle_updates_all_equally_often_whatever_depends() -> None:
    """Blocks of the same parity never go together, so that each round has two."""
    scheduler, counts = Cyclic(at_once=3), np.zeros(7, int)
    state = scheduler.start(7, 0)
    for _ in range(70):
        candidates = scheduler.propose(state)
        parity = (candidates[:, None] % 2 == candidates % 2).astype(float)
        chosen = candidates[independent(parity, 0.1, 3)]
        counts[chosen] += 1
        state = scheduler.updated(state, chosen, np.zeros(len(chosen)))
    assert counts.max() - counts.min() <= 1 + 70 // 7  # the smaller class has its turn a little more often


def drawn(scheduler: Scheduler[Any], moved: list[float], rounds: int) -> np.ndarray[Any, Any]:
    """Share of the rounds in which each block is the first; all have moved before by ``moved``."""
    state = scheduler.start(len(moved), 3)
    state = scheduler.updated(state, np.arange(len(moved)), np.array(moved))
    counts = np.zeros(len(moved))
    for _ in range(rounds):
        counts[scheduler.propose(state)[0]] += 1
        state = state._replace(round=state.round + 1)
    return counts / rounds


@pytest.mark.parametrize(("power", "eta"), [(1.0, 0.1), (1.0, 1.0), (2.0, 0.5)])
def test_priority_draws_in_proportion_to_changes(power: float, eta: float) -> None:
    moved = [0.0, 1.0, 2.0, 4.0]
    share = np.array(moved) ** power
    share += eta * share[1:].mean()
    expected = share / share.sum()
    found = drawn(Priority(eta=eta, power=power), moved, 6000)
    # Five standard deviations of a share of 6,000 draws.
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 6000)), (found, expected)


def test_priority_is_uniform_where_nothing_moves() -> None:
    found = drawn(Priority(), [0.0] * 4, 6000)
    assert np.all(np.abs(found - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 6000))
    assert np.all(np.abs(drawn(Uniform(), [1.0, 0, 0, 9], 6000) - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 6000))


def test_priority_takes_each_once_before_any_twice() -> None:
    scheduler, seen = Priority(at_once=3), list[int]()
    state = scheduler.start(12, 0)
    for _ in range(4):
        chosen = scheduler.propose(state)[:3]
        seen += chosen.tolist()
        state = scheduler.updated(state, chosen, np.full(3, 1e12))
    assert sorted(seen) == list(range(12))


@given(count=st.integers(1, 9), most=st.integers(1, 9), seed=st.integers(0, 999))
@CHECK
def test_no_two_of_those_taken_depend_on_each_other(count: int, most: int, seed: int) -> None:
    dependency = np.random.default_rng(seed).random((count, count))
    dependency = (dependency + dependency.T) / 2
    taken = independent(dependency, 0.4, most)
    assert taken[0] == 0
    assert all(dependency[i, j] < 0.4 for i, j in itertools.combinations(taken, 2))
    if len(taken) < most:  # every other depends on one that was taken before it
        left = set(range(count)) - set(taken)
        assert all(any(dependency[i, j] >= 0.4 for j in taken if j < i) for i in left)


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=7), parts=st.integers(1, 3))
@CHECK
def test_the_dearest_part_is_within_a_third_of_the_best(costs: list[int], parts: int) -> None:
    """Graham 1969: 4/3 - 1/(3·parts)."""
    found = balanced(costs, parts)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(costs)))
    assert all(np.all(np.diff(part) > 0) for part in found)
    best = min(
        max(sum(c for c, o in zip(costs, owners, strict=True) if o == part) for part in range(parts))
        for owners in itertools.product(range(parts), repeat=len(costs))
    )
    dearest = max(sum(costs[i] for i in part) for part in found)
    assert dearest <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9
