"""Reducers: what their papers say, in parts and whole."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import InputError, Robust
from paceline.core.registry import family_of
from paceline.core.text_form import parse_value
from paceline.reduction import Reducer, Reduction
from paceline.reduction.delay_compensation import DelayCompensation
from paceline.reduction.krum import Krum
from paceline.reduction.median import Median
from paceline.reduction.trimmed_mean import TrimmedMean

CHECK = settings(max_examples=60, deadline=None, derandomize=True)


def deltas(count: int, elements: int = 7, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator, dtype=torch.float64) for _ in range(count)]


def reduced(reducer: Reducer, given: list[Tensor], cut: int = 0, **others: Any) -> Tensor:
    """Combine vectors, or two slices of them as two servers do."""
    slices = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    parts = [[each[part] for each in given] for part in slices]
    statistics = [sum(each) for each in zip(*map(reducer.statistics, parts), strict=True)]
    found, zero = [], torch.zeros_like(given[0])
    current, read = others.get("current", zero), others.get("read", [])
    for part, vectors in zip(slices, parts, strict=True):
        out = torch.full_like(vectors[0], torch.nan)
        kept = [each.clone() for each in vectors]
        weights = others.get("weights", [1 / len(given)] * len(given))
        reducer.combine(Reduction(vectors, weights, current[part], [each[part] for each in read], statistics), out)
        assert all(map(torch.equal, kept, vectors)), "they stay as they are"
        found.append(out)
    return torch.cat(found)


@CHECK
@given(count=st.integers(1, 9), cut=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_median(count: int, cut: int, seed: int) -> None:
    given = deltas(count, seed=seed)
    assert np.array_equal(reduced(Median(), given, cut).numpy(), np.median(np.stack(given), axis=0))


@CHECK
@given(count=st.integers(1, 9), trim=st.integers(0, 5), cut=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_trimmed_mean(count: int, trim: int, cut: int, seed: int) -> None:
    given = deltas(count, seed=seed)
    left_out = min(trim, (count - 1) // 2)
    rest = np.sort(np.stack(given), axis=0)[left_out : count - left_out]
    # The same few numbers, added in another order.
    assert np.allclose(reduced(TrimmedMean(trim), given, cut).numpy(), rest.mean(axis=0), rtol=1e-14, atol=1e-15)


@CHECK
@given(
    count=st.integers(1, 9),
    faulty=st.integers(0, 4),
    best=st.integers(1, 4),
    cut=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_krum(count: int, faulty: int, best: int, cut: int, seed: int) -> None:
    given = deltas(count, seed=seed)
    scores = []
    for i in range(count):
        squares = sorted(float(((given[i] - given[j]) ** 2).sum()) for j in range(count) if j != i)
        scores.append(sum(squares[: max(1, count - faulty - 2)]))
    chosen = np.argsort(scores, kind="stable")[:best]
    expected = np.stack(given)[np.sort(chosen)].mean(axis=0)
    assert np.allclose(reduced(Krum(faulty, best), given, cut).numpy(), expected, rtol=1e-14, atol=1e-15)


def test_krum_takes_none_of_those_that_lie() -> None:
    """Eight near one vector, and two that agree on another: the two nearest to each other are the liars."""
    honest = [torch.ones(5) + 0.1 * each.float() for each in deltas(8, 5)]
    lies = [torch.full((5,), -40.0), torch.full((5,), -40.0)]
    squares = [float(((a - b) ** 2).sum()) for a, b in combinations([*honest, *lies], 2)]
    assert max(Krum(faulty=2, best=6).chosen(10, squares)) < 8
    assert 8 in Krum(faulty=7).chosen(10, squares)  # which it does not hold against


@CHECK
@given(cut=st.integers(0, 6), strength=st.floats(0.01, 5))
def test_delay_compensation(cut: int, strength: float) -> None:
    one, other, current, read = deltas(4)
    found = reduced(
        DelayCompensation(strength), [one, other], cut, weights=[0.75, 0.25], current=current, read=[read, current]
    )
    expected = 0.75 * (one + strength * one * one * (current - read)) + 0.25 * other
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-14)


def test_it_is_the_gradient_at_the_present_parameters_where_the_hessian_is_its_square() -> None:
    """Of a(w) = -log(w)'s derivative -1/w the derivative is 1/w², its square: to first order it is exact."""
    read, current = torch.tensor([2.0], dtype=torch.float64), torch.tensor([2.001], dtype=torch.float64)
    given = {"weights": [1.0], "current": current, "read": [read]}
    found = reduced(DelayCompensation(1.0), [-1 / read], **given)
    assert abs(float(found + 1 / current)) < 1e-6 < abs(float(-1 / read + 1 / current))  # second order: 1e-6 / 8


@pytest.mark.parametrize(
    ("reducer", "too_few", "instead"),
    [
        (Krum(faulty=2), 6, "write krum:faulty=1,best=1"),
        (Krum(faulty=1, best=5), 5, "write krum:faulty=1,best=4"),
        (Krum(faulty=0), 2, "write by=median"),
        (TrimmedMean(trim=2), 4, "write trimmed-mean:trim=1"),
    ],
)
def test_too_few_for_a_rule_are_refused(reducer: Reducer, too_few: int, instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        Robust(reducer).resolved(learning_rate=None, replicas=too_few)
    Robust(reducer).resolved(learning_rate=None, replicas=too_few + 1)
    with pytest.raises(InputError, match=instead):
        Robust(reducer, k=too_few).resolved(learning_rate=None, replicas=2 * too_few)


@pytest.mark.parametrize(
    "text", ["trimmed-mean:trim=-1", "krum:faulty=-1", "krum:best=0", "delay-compensation:strength=0"]
)
def test_what_is_no_option_is_refused(text: str) -> None:
    family = family_of(Reducer)
    assert family is not None
    with pytest.raises(InputError, match="write "):
        parse_value(family, text)
