"""Each redistribution against its definition, forward and backward, and the collectives that it makes."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.replica.tensor.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    OnRank,
    Placement,
    Shard,
    even_sizes,
    memory_order,
)
from paceline.replica.tensor.redistribute import REDISTRIBUTIONS, Redistribute, redistribution_cost
from paceline.replica.tensor.tp_group import TPCollectives
from tests.replica.tensor.threads import together

PLAIN: tuple[Placement, ...] = (REPLICATE, PARTIAL_GRAD, PARTIAL)


def splits(k: int) -> list[Shard]:
    return [Shard(dim, even_sizes(10 // outer, k)[::-1], outer) for dim in (-1, -2, -3) for outer in (1, 2)]


def pairs(k: int) -> list[tuple[Placement, Placement]]:
    layouts = (*PLAIN, *splits(k))
    owned = [(OnRank(k - 1), after) for after in PLAIN]
    return [*((a, b) for a, b in product(layouts, layouts) if a != b), *owned]


def numbers(seed: int) -> Tensor:
    return torch.randn(10, 10, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def terms(whole: Tensor, k: int) -> list[Tensor]:
    made = [numbers(100 + shard) for shard in range(k - 1)]
    return [*made, whole - sum(made, torch.zeros_like(whole))]


def values(layout: Placement, whole: Tensor, k: int) -> list[Tensor]:
    """What each shard has of a value."""
    if isinstance(layout, Shard):
        return [layout.take(whole, shard).clone() for shard in range(k)]
    if isinstance(layout, OnRank):
        return [whole.clone() if shard == layout.shard else torch.full_like(whole, torch.nan) for shard in range(k)]
    return terms(whole, k) if layout == PARTIAL else [whole.clone() for _ in range(k)]


def gradients(layout: Placement, whole: Tensor, k: int) -> list[Tensor]:
    """What each shard has of a gradient."""
    if isinstance(layout, Shard):
        return values(layout, whole, k)
    return terms(whole, k) if layout == PARTIAL_GRAD else [whole.clone() for _ in range(k)]


def assert_are(parts: list[Tensor], expected: list[Tensor], *, summed: bool) -> None:
    if summed:
        parts, expected = [torch.stack(parts).sum(0)], [torch.stack(expected).sum(0)]
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=0, atol=1e-12)  # numbers near 1, at most 8 of them added up


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_value_gradient_and_collectives_are_those_of_the_table(k: int) -> None:
    value, gradient = numbers(1), numbers(2)
    tried = set()
    for before, after in pairs(k):
        has, seeds = values(before, value, k), gradients(after, gradient, k)

        def forward(
            shards: TPCollectives, given: list[Tensor] = has, pair: tuple[Placement, Placement] = (before, after)
        ) -> Tensor:
            return Redistribute(shards, "x", *pair)(given[shards.rank].requires_grad_())

        def both(
            shards: TPCollectives, given: list[Tensor] = has, seeds: list[Tensor] = seeds
        ) -> tuple[Tensor, Tensor]:
            made = forward(shards, given)
            (back,) = torch.autograd.grad(made, given[shards.rank], seeds[shards.rank])
            return made.detach(), back

        def work(shards: TPCollectives) -> tuple[Tensor, Tensor]:
            return both(shards)

        made, calls = together(k, work)
        _, forwards = together(k, forward)
        assert_are([m for m, _ in made], values(after, value, k), summed=after == PARTIAL)
        backs = [g for _, g in made]
        if isinstance(before, OnRank):  # the others' stand-ins have no gradient
            assert_are([backs[before.shard]], [gradient], summed=False)
        else:
            assert_are(backs, gradients(before, gradient, k), summed=before == PARTIAL_GRAD)
        priced = redistribution_cost(before, after, k, differentiable=True)
        assert priced is not None
        assert (forwards.total(), calls.total() - forwards.total()) == tuple(
            int(bool(name)) for name in priced.collectives
        ), (before, after, calls)
        tried.add((type(before), type(after)))
    assert tried == set(REDISTRIBUTIONS)


@pytest.mark.parametrize(
    ("before", "after", "there", "back"),
    [
        (REPLICATE, PARTIAL_GRAD, {}, {"all_reduce": 1}),
        (PARTIAL, REPLICATE, {"all_reduce": 1}, {}),
        (PARTIAL, PARTIAL_GRAD, {"all_reduce": 1}, {"all_reduce": 1}),
        (REPLICATE, Shard(-1, (5, 5)), {}, {"all_gather": 1}),
        (Shard(-1, (5, 5)), REPLICATE, {"all_gather": 1}, {}),
        (Shard(-1, (5, 5)), PARTIAL_GRAD, {"all_gather": 1}, {"reduce_scatter": 1}),
        (PARTIAL, Shard(-1, (5, 5)), {"reduce_scatter": 1}, {"all_gather": 1}),
        (Shard(-1, (5, 5)), Shard(-2, (5, 5)), {"all_gather": 1}, {"all_gather": 1}),
        (OnRank(1), REPLICATE, {"broadcast": 1}, {}),
        (OnRank(1), PARTIAL_GRAD, {"broadcast": 1}, {"reduce": 1}),
        (OnRank(1), PARTIAL, {}, {}),
    ],
)
def test_they_make_the_collectives_that_are_drawn(
    before: Placement, after: Placement, there: dict[str, int], back: dict[str, int]
) -> None:
    has, seeds = values(before, numbers(1), 2), gradients(after, numbers(2), 2)

    def forward(shards: TPCollectives) -> Tensor:
        return Redistribute(shards, "x", before, after)(has[shards.rank].requires_grad_())

    def both(shards: TPCollectives) -> None:
        forward(shards).backward(seeds[shards.rank])

    _, forwards = together(2, forward)
    _, calls = together(2, both)
    assert forwards == Counter(there)
    assert calls - forwards == Counter(back)


def test_what_has_no_gradient_pays_for_none() -> None:
    for before, after in pairs(3):
        known = redistribution_cost(before, after, 3, differentiable=False)
        assert known is not None
        assert known.backward == 0
        assert known.collectives[1] == ""


def test_nothing_is_brought_to_one_shard_alone() -> None:
    """Who works on a branch takes what all have."""
    for before in (*PLAIN, *splits(2)):
        assert redistribution_cost(before, OnRank(0), 2, differentiable=True) is None


def test_one_shard_sends_nothing() -> None:
    for before, after in pairs(1):
        known = redistribution_cost(before, after, 1, differentiable=True)
        assert known is not None
        assert known.forward == known.backward == 0


@pytest.mark.parametrize(
    ("before", "after"), [(Shard(-1, (6, 4)), REPLICATE), (REPLICATE, Shard(-2, (6, 4))), (PARTIAL, REPLICATE)]
)
def test_dims_keep_their_order_in_memory(before: Placement, after: Placement) -> None:
    has = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in values(before, numbers(1), 2)]
    made, _ = together(2, lambda shards: memory_order(Redistribute(shards, "x", before, after)(has[shards.rank])))
    assert made == [[2, 1, 0]] * 2
