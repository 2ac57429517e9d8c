"""Search of the cheapest plan through a graph, exactly, by dynamic programming.

The search goes through the operators in order and keeps, for each state (the placements of the tensors that are still
needed), the cheapest path to it. Where branches begin it follows both modes: each branch on one shard, for all of them
alike, or sharded as everything else.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

from paceline.replica.tensor import redistribute
from paceline.replica.tensor.base import OpCall, OpStrategy, aten, rule_of
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import REPLICATE
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey

_PIECES = (aten.select.int, aten.slice.Tensor, aten.narrow.default)


@dataclass(frozen=True)
class SearchStep:
    """The choice for one operator."""

    call: OpCall
    strategy: OpStrategy
    redistributions: tuple[redistribute.Redistribution, ...]
    """(tensor, from, to) of the inputs that are redistributed for it, and were not before."""


@dataclass(frozen=True)
class OpChoice:
    """Strategies that are open for one operator."""

    call: OpCall
    strategies: Sequence[OpStrategy]
    alone: Sequence[OpStrategy] = ()
    """Strategies instead of these, where its branch is on one shard."""
    region: int | None = None
    """Region of branches that it belongs to."""
    joins: int | None = None
    """Region that ends with it."""


@dataclass(frozen=True)
class SearchPath:
    """The cheapest path to a state."""

    cost: PlanCost
    step: SearchStep | None
    before: "SearchPath | None"

    def steps(self) -> list[SearchStep]:
        """Return the steps from the first to the last."""
        steps, path = list[SearchStep](), self
        while path.step is not None and path.before is not None:
            steps.append(path.step)
            path = path.before
        return steps[::-1]


class _State(NamedTuple):
    present: tuple[tuple[ValueKey, Placements], ...] = ()
    """Placements of the tensors that are still needed."""
    alone: tuple[tuple[int, bool], ...] = ()
    """(region, True if each of its branches is on one shard) of the regions that are under way."""


@dataclass(frozen=True)
class _Transition:
    """One strategy, from one state of its inputs."""

    cost: PlanCost
    step: SearchStep
    present: Mapping[ValueKey, Placements]
    """Placements afterwards of its inputs and of those outputs that are needed."""


def cheapest_path(
    graph: OperatorGraph, choices: Iterable[OpChoice], shards: int, common: Mapping[ValueKey, Placements]
) -> SearchPath | None:
    """Return the cheapest path; None if there is none, or if ``common`` has promised too much.

    Args:
        graph: operators of the captured graph.
        choices: strategies of each of them, in order.
        shards: k.
        common: placements of a parameter that all its operators can take.
    """
    search = _Search(graph, shards, common)
    paths = {_State(): SearchPath(PlanCost(), None, None)}
    for choice in choices:
        paths = search.advance(paths, choice)
        if not paths:
            return None
        # Paths compete only with those that have their branches in the same mode.
        by_mode: dict[object, dict[_State, SearchPath]] = defaultdict(dict)
        for state, path in paths.items():
            by_mode[state.alone][state] = path
        paths = {state: path for mode in by_mode.values() for state, path in search.worthwhile(mode)}
    ended = ((path.cost + search.output_cost(state), path) for state, path in paths.items())
    cost, path = min(ended, key=lambda each: each[0])
    return SearchPath(cost, path.step, path.before)


class _Search:
    def __init__(self, graph: OperatorGraph, shards: int, common: Mapping[ValueKey, Placements]) -> None:
        self._shards, self._common, self._outputs = shards, common, graph.outputs()
        self._values = {value.key: value for values in graph.values.values() for value in values}
        self._first_use: dict[ValueKey, OpCall] = {}
        self._last_use: dict[ValueKey, OpCall | None] = {}
        for call in graph.calls.values():
            for value in call.inputs:
                self._first_use.setdefault(value.key, call)
                self._last_use[value.key] = call
        self._last_use.update((value.key, None) for value in self._outputs)  # needed to the end

    def advance(self, paths: Mapping[_State, SearchPath], choice: OpChoice) -> dict[_State, SearchPath]:
        """Return the cheapest path to each state after an operator."""
        after: dict[_State, SearchPath] = {}
        # Transitions depend on the operator's inputs alone, which many states have alike.
        transitions: dict[tuple[object, ...], list[_Transition]] = {}
        call = choice.call
        inputs = [value.key for value in call.inputs]
        ended = {key for key in inputs if self._last_use[key] is call}
        for state, path in paths.items():
            present = dict(state.present)
            for strategies, alone in _modes(choice, state):
                inputs_key = (strategies is choice.alone, *map(present.get, inputs))
                if inputs_key not in transitions:
                    open_ = self.without_detours(call, strategies, present)
                    transitions[inputs_key] = list(self.transitions(call, open_, present))
                for each in transitions[inputs_key]:
                    cost, merged = path.cost + each.cost, {**present, **each.present}
                    left = _State(tuple(item for item in merged.items() if item[0] not in ended), alone)
                    # Of equal costs the first wins: the order is the same on all shards.
                    best = after.get(left)
                    if best is None or cost < best.cost:
                        after[left] = SearchPath(cost, each.step, path)
        return after

    def transitions(
        self, call: OpCall, strategies: Sequence[OpStrategy], present: Mapping[ValueKey, Placements]
    ) -> Iterator[_Transition]:
        work = op_work(call)
        for strategy in strategies:
            taken = redistribute.input_cost(call, strategy, present)
            if taken is not None:
                cost, redistributions, placements = taken
                for value, placement in zip(call.outputs, strategy.outputs, strict=True):
                    if value.key in self._last_use:
                        placements[value.key] = frozenset((placement,))
                sent = round(strategy.sent_bytes * call.shards)
                cost += PlanCost(0, sent, strategy.collectives, work * strategy.share)
                yield _Transition(cost, SearchStep(call, strategy, redistributions), placements)

    def without_detours(
        self, call: OpCall, strategies: Sequence[OpStrategy], present: Mapping[ValueKey, Placements]
    ) -> Sequence[OpStrategy]:
        """Return the strategies that take an input as it is, where it may as well be redistributed afterwards.

        So it is for the only user of a tensor that returns one as large, and for what takes a piece of it, unless it is
        the first to take one: pieces have no more bytes than the whole.
        """
        rule = rule_of(call.target)
        filled = [index for index, value in enumerate(call.inputs) if value.nbytes]
        if rule is None or rule.redistributes or len(filled) != 1 or call.inputs[filled[0]].key not in present:
            return strategies
        value = call.inputs[filled[0]]
        key = value.key
        same_size = len(call.outputs) == 1 and call.outputs[0].nbytes == value.nbytes
        only_user = same_size and self._last_use.get(key) is call
        later_piece = call.target in _PIECES and self._first_use[key] is not call
        if not only_user and not later_piece and call.target is not getitem:
            return strategies
        return [each for each in strategies if each.inputs[filled[0]] in present[key]] or strategies

    def worthwhile(self, paths: Mapping[_State, SearchPath]) -> Iterator[tuple[_State, SearchPath]]:
        """Yield the paths that may still win against the cheapest one.

        A path is dropped if the cheapest is no worse even after redistributing all tensors to that path's placements.
        """
        cheapest, best = min(paths.items(), key=lambda item: item[1].cost)
        present = dict(cheapest.present)
        for state, path in paths.items():
            if path is best or self.may_win(state, path, present, best.cost):
                yield state, path

    def may_win(
        self, state: _State, path: SearchPath, present: Mapping[ValueKey, Placements], cheapest: PlanCost
    ) -> bool:
        """Return True if a path may end cheaper than the cheapest one, which has ``present`` for ``cheapest``.

        A parameter is never redistributed. But where all its operators can take it as the cheapest path has it, no
        bytes make up for more weights that another path replicates.
        """
        cost = cheapest
        for key, placements in state.present:
            for placement in placements:
                if placement in present[key]:
                    continue
                change = redistribute.cheapest_redistribution(self._values[key], present[key], placement, self._shards)
                if change is not None:
                    cost += change[1]
                elif cheapest.whole >= path.cost.whole or not present[key] <= self._common.get(key, frozenset()):
                    return True
            if cost > path.cost:
                return True
        return False

    def output_cost(self, state: _State) -> PlanCost:
        """Return the cost of replicating the model's outputs."""
        cost, present = PlanCost(), dict(state.present)
        for value in self._outputs:
            sources = present.get(value.key, frozenset((REPLICATE,)))
            if REPLICATE in sources or value.parameter is not None:
                continue
            cheapest = redistribute.cheapest_redistribution(value, sources, REPLICATE, self._shards)
            if cheapest is None:
                return PlanCost(2**62)
            cost += cheapest[1]
        return cost


def _modes(choice: OpChoice, state: _State) -> Iterator[tuple[Sequence[OpStrategy], tuple[tuple[int, bool], ...]]]:
    """Yield the strategies that are open in a state, and the modes of its regions then."""
    begun = {region: alone for region, alone in state.alone if region != choice.joins}
    if choice.region is None:
        yield choice.strategies, tuple(begun.items())
        return
    for alone in (False, True):
        if begun.get(choice.region, alone) is alone:
            strategies = choice.alone if alone else choice.strategies
            yield strategies, tuple(sorted({**begun, choice.region: alone}.items()))
