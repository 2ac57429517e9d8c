"""The best cut for given costs: what comes out of trying them all."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.replica.pipeline.partition import (
    NOISE,
    Boundaries,
    MemoryLimit,
    SharedItem,
    UnitCosts,
    named_boundaries,
    partition,
)


def total(items: Sequence[SharedItem], first: int, last: int, *, made_before: bool) -> int:
    """Bytes of what units ``first`` .. ``last`` - 1 use; of values only what is made before them."""
    return sum(
        item.nbytes
        for item in items
        if any(first <= use < last for use in item.uses) and (not made_before or item.producer < first)
    )


class Priced:
    """What one cut costs, by definition."""

    def __init__(self, row: UnitCosts, cuts: Boundaries, limit: MemoryLimit | None, turns: Sequence[int]) -> None:
        self.cuts = cuts
        edges = [0, *cuts, len(row.seconds)]
        parts = list(itertools.pairwise(edges))
        self.slowest = max(sum(row.seconds[a:b]) / n for (a, b), n in zip(parts, turns, strict=True))
        self.sent = sum(total(row.values, a, b, made_before=True) for a, b in parts)
        self.memory = (
            [0] * len(parts)
            if limit is None
            else [
                limit.copies * total(row.held, a, b, made_before=False)
                + limit.in_flight[k] * total(row.saved, a, b, made_before=False)
                for k, (a, b) in enumerate(parts)
            ]
        )


def every(
    row: UnitCosts, parts: int, candidates: Sequence[int], limit: MemoryLimit | None, turns: Sequence[int]
) -> list[Priced]:
    return [Priced(row, cuts, limit, turns) for cuts in itertools.combinations(sorted(candidates), parts - 1)]


# Whole numbers of seconds, so that sums don't depend on their order; large ones, so that 1 % of them is something.
seconds = st.integers(0, 400)


@st.composite
def rows(draw: st.DrawFn) -> UnitCosts:
    count = draw(st.integers(1, 9))
    units = st.integers(0, count - 1)
    uses = st.lists(units, min_size=1, max_size=3).map(lambda u: tuple(sorted(set(u))))
    values = [
        SharedItem(draw(st.integers(0, 50)), later, made)
        for made in range(count - 1)
        if (later := tuple(sorted(set(draw(st.lists(st.integers(made + 1, count - 1), max_size=3))))))
    ]
    free = st.lists(st.builds(SharedItem, st.integers(0, 50), uses), max_size=6)
    return UnitCosts(draw(st.lists(seconds, min_size=count, max_size=count)), values, draw(free), draw(free))


@given(rows(), st.data())
def test_no_cut_is_better(row: UnitCosts, data: st.DataObject) -> None:
    count = len(row.seconds)
    candidates = data.draw(st.sets(st.integers(1, count - 1)) if count > 1 else st.just(set()), "candidates")
    parts = data.draw(st.integers(1, len(candidates) + 1), "parts")
    flights = st.lists(st.integers(1, 4), min_size=parts, max_size=parts)
    limits = st.builds(MemoryLimit, st.integers(0, 300), flights, st.integers(1, 4))
    limit = data.draw(st.none() | limits, "limit")
    turns = data.draw(st.just([1] * parts) | st.lists(st.integers(1, 3), min_size=parts, max_size=parts), "turns")
    cuts = every(row, parts, candidates, limit, turns)
    allowed = [cut for cut in cuts if limit is None or max(cut.memory) <= limit.nbytes]
    if not allowed:
        assert limit is not None
        need = min(max(cut.memory) for cut in cuts)
        with pytest.raises(
            InputError, match=rf"stage_memory_bytes={limit.nbytes} can't .* write stage_memory_bytes={need}"
        ):
            partition(row, parts, candidates=candidates, limit=limit, replicas=turns)
        return
    cut = partition(row, parts, candidates=candidates, limit=limit, replicas=turns)
    found = Priced(row, cut, limit, turns)
    bound = min(cut.slowest for cut in allowed) * (1 + NOISE)
    near = [cut for cut in allowed if cut.slowest <= bound]
    best = min((cut.sent, cut.slowest) for cut in near)
    assert found.cuts in [cut.cuts for cut in allowed]
    assert found.sent == best[0]
    assert found.slowest == pytest.approx(best[1])


def test_a_limit_moves_the_cut() -> None:
    row = UnitCosts([1.0, 1.0, 1.0, 1.0], saved=[SharedItem(10, (unit,)) for unit in range(4)])
    assert partition(row, 2) == (2,)
    assert partition(row, 2, limit=MemoryLimit(39, in_flight=[2, 1])) == (1,)


def test_what_two_units_share_is_held_once() -> None:
    row = UnitCosts([1.0] * 4, held=[SharedItem(10, (0, 1)), SharedItem(10, (2,)), SharedItem(10, (3,))])
    assert partition(row, 2, limit=MemoryLimit(20, in_flight=[2, 1])) == (2,)


def test_a_limit_that_cannot_be_met_says_what_is_needed_and_where() -> None:
    row = UnitCosts([1.0, 1.0, 1.0], saved=[SharedItem(10, (0,)), SharedItem(30, (1,)), SharedItem(10, (2,))])
    wanted = (
        r"stage_memory_bytes=50 can't be met: .* needs 70 bytes in part 0, where 7 micro-batches are in flight; "
        r"write stage_memory_bytes=70, or more stages, or recompute=all"
    )
    with pytest.raises(InputError, match=wanted):
        partition(row, 2, limit=MemoryLimit(50, in_flight=[7, 1]))


@pytest.mark.parametrize(
    ("parts", "candidates", "message"),
    [
        (0, None, r"stages=0 must be at least 1; write stages=1"),
        (4, None, r"stages=4 needs 3 places .* the model has 3 operations that can be cut apart; write stages=3"),
        (3, [2], r"stages=3 needs 2 places .* its paceline.cut marks leave 2 pieces; write stages=2, or add marks"),
    ],
)
def test_more_parts_than_pieces(parts: int, candidates: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(UnitCosts([1.0, 1.0, 1.0]), parts, candidates=candidates)


def test_as_many_marks_as_cuts_are_all_taken() -> None:
    assert partition(UnitCosts([9.0, 1.0, 1.0, 1.0]), 3, candidates=[2, 3]) == (2, 3)


def test_names_give_boundaries() -> None:
    modules, nodes = {"h": 0, "h.0": 0, "h.1": 2, "head": 5}, {"add_1": 3}
    assert named_boundaries(["h.1", "add_1", "head"], 4, modules, nodes) == (2, 3, 5)
    assert named_boundaries([], 1, modules, nodes) == ()


@pytest.mark.parametrize(
    ("cuts", "parts", "message"),
    [
        (["h.2"], 2, r"unknown module or node in cuts 'h.2'; did you mean"),
        (["h.1"], 3, r"names where 1 stages begin, but .*stages=3.* write stages=2 or name 2"),
        (["head", "h.1"], 3, r"'h.1' comes before 'head' in the model; write cuts=\('h.1', 'head'\)"),
        (["h.1", "h.1"], 3, r"'h.1' and 'h.1' begin with the same operation"),
        (["h.0"], 2, r"'the model' and 'h.0' begin with the same operation, so the stage between them would be empty"),
    ],
)
def test_names_that_give_none(cuts: list[str], parts: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        named_boundaries(cuts, parts, {"h": 0, "h.0": 0, "h.1": 2, "head": 5}, {})
