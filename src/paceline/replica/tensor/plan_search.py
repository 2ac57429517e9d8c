"""The cheapest way through a graph, exactly.

Goes through the operators in order and keeps, for each way in which the tensors that are still needed may lie, the
cheapest way to get there (dynamic programming). Where branches begin it goes both ways: each on one shard, all of them,
or divided as everything else.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

import torch

from paceline.replica.tensor.base import OpCall, OpStrategy, rule_of
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import REPLICATE
from paceline.replica.tensor.redistribute_cost import (
    Placements,
    PlanCost,
    Redistribution,
    ValueKey,
    cheapest_redistribution,
    input_cost,
    value_key,
)

_PIECES = (torch.ops.aten.select.int, torch.ops.aten.slice.Tensor, torch.ops.aten.narrow.default)


@dataclass(frozen=True)
class SearchStep:
    """What was chosen for one operator."""

    call: OpCall
    strategy: OpStrategy
    redistributions: tuple[Redistribution, ...]
    """(tensor, from, to) of what has to be converted for it, and was not before."""


@dataclass(frozen=True)
class OpChoice:
    """What may be chosen for one operator."""

    call: OpCall
    strategies: Sequence[OpStrategy]
    alone: Sequence[OpStrategy] = ()
    """Instead of these, where the branch that it belongs to is on one shard."""
    region: int | None = None
    """Of branches, that it belongs to."""
    joins: int | None = None
    """The region that ends with it."""


@dataclass(frozen=True)
class SearchPath:
    """The cheapest way to a state."""

    cost: PlanCost
    step: SearchStep | None
    before: "SearchPath | None"

    def steps(self) -> list[SearchStep]:
        """From the first to the last."""
        return list(reversed(list(self._back())))

    def _back(self) -> Iterator[SearchStep]:
        path: SearchPath | None = self
        while path is not None and path.step is not None:
            yield path.step
            path = path.before


class _State(NamedTuple):
    there: tuple[tuple[ValueKey, Placements], ...] = ()
    alone: tuple[tuple[int, bool], ...] = ()
    """Of each region that is under way: whether its branches are on one shard each."""


@dataclass(frozen=True)
class _Taken:
    """One way, from one state of what it takes."""

    cost: PlanCost
    step: SearchStep
    there: Mapping[ValueKey, Placements]
    """What is there afterwards that is needed, of what it takes and gives."""


def cheapest_path(
    operators: OperatorGraph, choices: Iterable[OpChoice], shards: int, common: Mapping[ValueKey, Placements]
) -> SearchPath | None:
    """The cheapest path; None where there is none, or where ``common`` has promised too much.

    Args:
        operators: of the captured graph.
        choices: for each of them, in order.
        shards: k.
        common: in which layouts a parameter can be taken by all operators that take it.
    """
    return _Search(operators, shards, common).best(choices)


class _Search:
    def __init__(self, operators: OperatorGraph, shards: int, common: Mapping[ValueKey, Placements]) -> None:
        self._operators, self._shards, self._common = operators, shards, common
        self._values = {value_key(value): value for given in operators.values.values() for value in given}
        self._last = self._last_uses()
        self._first = self._first_uses()

    def best(self, choices: Iterable[OpChoice]) -> SearchPath | None:
        paths = {_State(): SearchPath(PlanCost(), None, None)}
        for choice in choices:
            paths = self._onward(paths, choice)
            if not paths:
                return None
            paths = self._worthwhile(paths)
        return min((self._ended(path, state) for state, path in paths.items()), key=lambda path: path.cost)

    def _last_uses(self) -> dict[ValueKey, OpCall | None]:
        """The operator after which a tensor is no longer needed; None: it is an output."""
        found: dict[ValueKey, OpCall | None] = {}
        for call in self._operators.calls.values():
            for value in call.inputs:
                found[value_key(value)] = call
        for value in self._operators.outputs():
            found[value_key(value)] = None
        return found

    def _first_uses(self) -> dict[ValueKey, OpCall]:
        found: dict[ValueKey, OpCall] = {}
        for call in self._operators.calls.values():
            for value in call.inputs:
                found.setdefault(value_key(value), call)
        return found

    def _onward(self, paths: Mapping[_State, SearchPath], choice: OpChoice) -> dict[_State, SearchPath]:
        found: dict[_State, SearchPath] = {}
        known: dict[tuple[object, ...], list[_Taken]] = {}
        call = choice.call
        places = [value_key(value) for value in call.inputs]
        ended = {place for place in places if self._last[place] is call}
        for state, path in paths.items():
            there = dict(state.there)
            for strategies, alone in _modes(choice, state):
                inputs = (strategies is choice.alone, *map(there.get, places))
                if inputs not in known:
                    known[inputs] = list(self._all_taken(call, self._followed(call, strategies, there), there))
                for each in known[inputs]:
                    cost, after = path.cost + each.cost, {**there, **each.there}
                    left = _State(tuple(item for item in after.items() if item[0] not in ended), alone)
                    best = found.get(left)
                    if best is None or cost < best.cost:
                        found[left] = SearchPath(cost, each.step, path)
        return found

    def _all_taken(
        self, call: OpCall, strategies: Sequence[OpStrategy], there: Mapping[ValueKey, Placements]
    ) -> Iterator[_Taken]:
        done = op_work(call)
        for strategy in strategies:
            had = input_cost(call, strategy, there)
            if had is not None:
                cost, converted, versions = had
                given = zip(call.outputs, strategy.outputs, strict=True)
                made = {value_key(v): frozenset((layout,)) for v, layout in given if value_key(v) in self._last}
                own = PlanCost(0, round(strategy.sent_bytes * call.shards), strategy.collectives, done * strategy.share)
                yield _Taken(cost + own, SearchStep(call, strategy, converted), versions | made)

    def _followed(
        self, call: OpCall, strategies: Sequence[OpStrategy], there: Mapping[ValueKey, Placements]
    ) -> Sequence[OpStrategy]:
        """What alone takes a tensor and gives one as large takes it as it is, if it can: it may be converted after.

        So does what takes a piece of it, unless it is the first to take one: pieces have no more bytes than the whole.
        """
        rule = rule_of(call.target)
        filled = [index for index, value in enumerate(call.inputs) if value.nbytes]
        if rule is None or rule.converts or len(filled) != 1 or value_key(call.inputs[filled[0]]) not in there:
            return strategies
        value = call.inputs[filled[0]]
        alone = (
            len(call.outputs) == 1
            and call.outputs[0].nbytes == value.nbytes
            and self._last.get(value_key(value)) is call
        )
        piece = call.target in _PIECES and self._first[value_key(value)] is not call
        if not alone and not piece and call.target is not getitem:
            return strategies
        return [
            strategy for strategy in strategies if strategy.inputs[filled[0]] in there[value_key(value)]
        ] or strategies

    def _worthwhile(self, paths: Mapping[_State, SearchPath]) -> dict[_State, SearchPath]:
        """Without those that the cheapest one is no worse than even if it converts all that they have as they have it;
        among those that have their branches alike.
        """
        apart: dict[object, dict[_State, SearchPath]] = defaultdict(dict)
        for state, path in paths.items():
            apart[state.alone][state] = path
        return {state: path for alike in apart.values() for state, path in self._of_alike(alike)}

    def _of_alike(self, paths: Mapping[_State, SearchPath]) -> Iterator[tuple[_State, SearchPath]]:
        cheapest, path = min(paths.items(), key=lambda item: item[1].cost)
        there = dict(cheapest.there)
        for state, other in paths.items():
            if other is path or self._is_worthwhile(state, other, there, path.cost):
                yield state, other

    def _is_worthwhile(
        self, state: _State, other: SearchPath, there: Mapping[ValueKey, Placements], cost: PlanCost
    ) -> bool:
        """A parameter is never converted. But where all that take it can take it as the cheapest path has it, no bytes
        weigh up that another leaves more weights whole.
        """
        cheapest = cost
        for place, versions in state.there:
            for layout in versions:
                if layout not in there[place]:
                    found = cheapest_redistribution(self._values[place], there[place], layout, self._shards)
                    if found is not None:
                        cost += found[1]
                    elif cheapest.whole >= other.cost.whole or not there[place] <= self._common.get(place, frozenset()):
                        return True
            if cost > other.cost:
                return True
        return False

    def _ended(self, path: SearchPath, state: _State) -> SearchPath:
        """With all outputs whole."""
        there = dict(state.there)
        for value in self._operators.outputs():
            known = there.get(value_key(value), frozenset((REPLICATE,)))
            if REPLICATE in known or value.parameter is not None:
                continue
            found = cheapest_redistribution(value, known, REPLICATE, self._shards)
            if found is None:
                return SearchPath(PlanCost(2**62), path.step, path.before)
            path = SearchPath(path.cost + found[1], path.step, path.before)
        return path


def _modes(choice: OpChoice, state: _State) -> Iterator[tuple[Sequence[OpStrategy], tuple[tuple[int, bool], ...]]]:
    """The ways that are open in a state, and how its branches are then."""
    begun = {region: alone for region, alone in state.alone if region != choice.joins}
    if choice.region is None:
        yield choice.strategies, tuple(begun.items())
        return
    for alone in (False, True):
        if begun.get(choice.region, alone) is alone:
            strategies = choice.alone if alone else choice.strategies
            yield strategies, tuple(sorted({**begun, choice.region: alone}.items()))
