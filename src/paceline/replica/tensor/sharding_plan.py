"""Choose how each operator is sharded: its options, the user's rules, and the plan that sends the fewest bytes.

A strategy's ``shard_rules``: of the ways of an operator, the plan may choose among those of one name alone.

Which way each operator is divided: the one by which the fewest bytes are sent, exactly.

What is compared is, first the elements of weights that are left whole, then bytes that a shard sends forward and
backward, then the work of the shard that has most (:mod:`paceline.replica.tensor.plan_search`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import final

from paceline.core.errors import InputError, unknown
from paceline.replica.tensor.base import (
    Available,
    GraphTensor,
    OpCall,
    OpStrategy,
    replicated_strategies,
    rule_of,
    sharded_strategies,
)
from paceline.replica.tensor.branch_on_rank import branch_strategy, join_strategies
from paceline.replica.tensor.branches import BRANCH, OpTimes, PlacedRegion, multiplication_counts, place_branches
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.placements import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    OnRank,
    Placement,
    Replicate,
    ReplicatePartialGrad,
    Shard,
)
from paceline.replica.tensor.plan_search import OpChoice, SearchStep, cheapest_path
from paceline.replica.tensor.redistribute_cost import Placements, PlanCost, ValueKey, value_key
from paceline.shard_rules import WHOLE, ShardRules

_MADE_WHOLE: frozenset[Placement] = frozenset((REPLICATE, PARTIAL_GRAD))


def module_of(call: OpCall, owners: Mapping[str, str]) -> str:
    """The full name of an operator's module; of a module that another one reaches into, as attention into its output's
    layer, that of the layer that holds the parameters.
    """
    owner = owners.get(call.node.name, "")
    within = f"{owner}." if owner else ""
    held = (str(value.parameter).rpartition(".")[0] for value in operator_parameters(call))
    return next((name for name in held if name.startswith(within)), owner)


def operator_parameters(call: OpCall) -> list[GraphTensor]:
    """What it takes of the model's parameters."""
    return [value for value in call.inputs if value.parameter is not None and value.differentiable]


def shards_a_parameter(call: OpCall, strategy: OpStrategy) -> bool:
    """Whether it divides a parameter."""
    return any(
        value.parameter is not None and isinstance(layout, (Shard, OnRank))
        for value, layout in zip(call.inputs, strategy.inputs, strict=True)
    )


def rule_strategies(call: OpCall, shards: int) -> Iterator[OpStrategy]:
    """Those that its rule has among so many shards, where all that it takes is there as a whole."""
    yield from sharded_strategies(replace(call, shards=shards), [_MADE_WHOLE] * len(call.inputs))


def strategy_names(call: OpCall, shards: int) -> list[str]:
    """Of those ways."""
    return list(dict.fromkeys(strategy.name for strategy in rule_strategies(call, shards) if strategy.name))


def largest_count(call: OpCall, name: str, shards: int) -> int:
    """Among how many shards, below ``shards``, a way of this name divides it; 0: there is none."""
    return next((count for count in range(shards - 1, 0, -1) if name in strategy_names(call, count)), 0)


@final
@dataclass
class UserRules:
    """What is asked for, and what was found of it.

    An operator is known by its module's full name. Asked for a way by name, an operator of that module that has none of
    that name is left to the plan, as long as another one of the module has it; "whole" leaves all of them undivided.

    Args:
        rules: of the strategy.
        owners: node name -> module, as :class:`~paceline.replica.capture.capture.Captured` has it.
        calls: of the captured graph.

    Raises:
        InputError: a pattern that matches no module whose operators have parameters.
    """

    rules: ShardRules
    owners: Mapping[str, str]
    calls: Sequence[OpCall]
    _found: set[str] = field(default_factory=set)
    """Modules of which an operator is divided as asked."""
    _names: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """Module -> names of its operators' ways, as they came up."""

    def __post_init__(self) -> None:
        known = {module for module, _ in self._with_parameters()}
        for pattern in self.rules:
            if not any(fnmatchcase(module, pattern) for module in known):
                raise unknown("module in shard_rules", pattern, known)

    def allowed(self, call: OpCall, strategies: Sequence[OpStrategy]) -> Sequence[OpStrategy]:
        """Those among the ways of an operator that the plan may choose."""
        module = module_of(call, self.owners)
        asked = self.rules.of(module)
        others = [strategy for strategy in strategies if not strategy.on_request]
        if asked is None:
            return others
        if asked == WHOLE:
            return (
                [strategy for strategy in strategies if _undivided(strategy)] if operator_parameters(call) else others
            )
        self._names[module] |= {strategy.name: None for strategy in strategies if strategy.name}
        named = [strategy for strategy in strategies if strategy.name == asked]
        if named:
            self._found.add(module)
        return named or others

    def asks_for_branch(self, call: OpCall) -> bool:
        """Whether an operator is to be in a branch that one shard works on."""
        return self.rules.of(module_of(call, self.owners)) == BRANCH

    def check(self) -> None:
        """After all operators: raise InputError where a module has no operator with a way of the name asked for."""
        for module, call in self._with_parameters():
            asked = self.rules.of(module)
            if asked not in (None, WHOLE) and module not in self._found:
                raise self._refusal(module, str(asked), call)

    def unplanned(self) -> InputError:
        """The error where no plan does all that is asked for."""
        return InputError(
            f"shard_rules={str(self.rules)!r} divide a parameter that several modules have in more than one way; write "
            "the same way for all of them"
        )

    def _with_parameters(self) -> Iterator[tuple[str, OpCall]]:
        for call in self.calls:
            if operator_parameters(call):
                yield module_of(call, self.owners), call

    def _refusal(self, module: str, asked: str, call: OpCall) -> InputError:
        of_module = [each for name, each in self._with_parameters() if name == module]
        said = f"shard_rules={{{str(self.rules.pattern(module))!r}: {asked!r}}}"
        largest = max(largest_count(each, asked, call.shards) for each in of_module)
        if largest:
            return InputError(
                f"{said}: shards={call.shards}, but {module} can be divided by {asked} among {largest} at most; write "
                f"shards={largest}, or {WHOLE} in place of {asked}"
            )
        return InputError(
            f"{said}: {module} ({call.node.name}) has no way {asked!r}; write one of: "
            f"{', '.join((*self._names[module], WHOLE))}"
        )


def _undivided(strategy: OpStrategy) -> bool:
    return all(
        isinstance(layout, (Replicate, ReplicatePartialGrad)) for layout in (*strategy.inputs, *strategy.outputs)
    )


NO_RULES = ShardRules()
NOTHING: Mapping[str, Placement] = {}


@dataclass(frozen=True)
class ShardingPlan:
    """What was chosen for all operators."""

    graph: OperatorGraph
    shards: int
    steps: tuple[SearchStep, ...]
    parameters: Mapping[str, Placement]
    """Of each parameter and buffer."""
    cost: PlanCost


def plan_sharding(
    graph: OperatorGraph,
    shards: int,
    rules: ShardRules = NO_RULES,
    times: OpTimes = multiplication_counts,
    fixed: Mapping[str, Placement] = NOTHING,
) -> ShardingPlan:
    """The cheapest.

    Args:
        operators: of the captured graph.
        shards: k.
        rules: what it has to keep to.
        times: how long operators take, of branches that are to be given to shards; the same on all of them.
        fixed: parameters that lie in some way already.

    Raises:
        InputError: it can't keep to them.
    """
    override = UserRules(rules, graph.captured.owners, tuple(graph.calls.values()))
    open_ = op_choices(graph, override, place_branches(graph, shards, times, override.asks_for_branch), fixed)
    override.check()
    best = cheapest_path(graph, open_, shards, _common(open_)) or cheapest_path(graph, open_, shards, {})
    if best is None:
        raise override.unplanned()
    steps = tuple(best.steps())
    return ShardingPlan(
        graph,
        shards,
        steps,
        parameter_placements(steps),
        best.cost._replace(sent_bytes=best.cost.sent_bytes / shards),
    )


def op_choices(
    graph: OperatorGraph, override: UserRules, regions: Sequence[PlacedRegion], fixed: Mapping[str, Placement] = NOTHING
) -> list[OpChoice]:
    """The ways of each operator, whatever becomes of the others."""
    return list(_Choices(graph, override, regions, fixed).all())


class _Choices:
    def __init__(
        self,
        graph: OperatorGraph,
        override: UserRules,
        regions: Sequence[PlacedRegion],
        fixed: Mapping[str, Placement],
    ) -> None:
        self._operators, self._override, self._regions, self._fixed = graph, override, regions, fixed
        self._offers: dict[ValueKey, frozenset[Placement]] = {}

    def all(self) -> Iterator[OpChoice]:
        for call in self._operators.calls.values():
            made = self._of(call)
            for index, value in enumerate(call.outputs):
                self._offers[value_key(value)] = frozenset(
                    strategy.outputs[index] for strategy in (*made.strategies, *made.alone)
                )
            yield made

    def _of(self, call: OpCall) -> OpChoice:
        inside = [i for i, region in enumerate(self._regions) if region.branch(call.node) is not None]
        ends = [i for i, region in enumerate(self._regions) if region.region.join is call.node]
        alone = [branch_strategy(call, self._regions[i]) for i in inside]
        strategies = [
            *self._ways(call),
            *(strategy for i in ends for strategy in join_strategies(call, self._regions[i])),
        ]
        allowed = self._override.allowed(
            call, [strategy for strategy in (*strategies, *alone) if self._keeps(call, strategy)]
        )
        return OpChoice(
            call,
            [strategy for strategy in allowed if strategy not in alone],
            [strategy for strategy in alone if strategy in allowed],
            next(iter(inside), None),
            next(iter(ends), None),
        )

    def _keeps(self, call: OpCall, strategy: OpStrategy) -> bool:
        """Whether it takes parameters as they lie already."""
        taken = zip(call.inputs, strategy.inputs, strict=True)
        return all(self._fixed.get(str(value.parameter), layout) == layout for value, layout in taken)

    def _ways(self, call: OpCall) -> Iterator[OpStrategy]:
        yield from replicated_strategies(call)
        if rule_of(call.target) is not None:
            yield from sharded_strategies(call, self._given(call))

    def _given(self, call: OpCall) -> Available:
        rule = rule_of(call.target)
        given = [self._offers.get(value_key(value), frozenset((REPLICATE, PARTIAL_GRAD))) for value in call.inputs]
        given = [each | {PARTIAL} if any(isinstance(o, OnRank) for o in each) else each for each in given]
        return [each | {REPLICATE, PARTIAL_GRAD} for each in given] if rule is not None and rule.converts else given


def _common(choices: Iterable[OpChoice]) -> dict[ValueKey, Placements]:
    """In which layouts a parameter can be taken by all operators that take it."""
    found: dict[ValueKey, Placements] = {}
    for choice in choices:
        for index, value in enumerate(choice.call.inputs):
            if value.parameter is not None:
                here = frozenset(strategy.inputs[index] for strategy in (*choice.strategies, *choice.alone))
                found[value_key(value)] = found.get(value_key(value), here) & here
    return found


def parameter_placements(steps: Iterable[SearchStep]) -> dict[str, Placement]:
    """How each parameter and buffer lies where these steps are done."""
    found: dict[str, Placement] = {}
    for step in steps:
        for value, layout in zip(step.call.inputs, step.strategy.inputs, strict=True):
            if value.parameter is not None:
                found.setdefault(value.parameter, layout)
    return found
