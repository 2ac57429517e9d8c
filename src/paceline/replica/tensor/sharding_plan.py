"""Sharding plan: the strategies of each operator, the user's rules, and the choice that sends the fewest bytes.

Plans are compared by, first, the elements of weights that are replicated, then the bytes that a shard sends forward and
backward, then the work of the shard that has most; the best is found by :mod:`.plan_search`. By ``shard_rules`` the
plan may choose only among the strategies of one name for an operator.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import final

from paceline.core.errors import InputError, unknown
from paceline.replica.tensor import base
from paceline.replica.tensor.base import GraphTensor, OpCall, OpStrategy
from paceline.replica.tensor.branch_on_rank import BRANCH
from paceline.replica.tensor.branches import PlacedRegion, place_branches
from paceline.replica.tensor.cost_network import OpChoice
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import OpTimes, multiplication_counts
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.plan_search import SearchStep, cheapest_steps
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey
from paceline.shard_rules import WHOLE, ShardRules

_WHOLE: Placements = frozenset((REPLICATE, PARTIAL_GRAD))

NO_RULES = ShardRules()
NOTHING: Mapping[str, Placement] = {}


@dataclass(frozen=True)
class ShardingPlan:
    """The strategies that were chosen for all operators."""

    graph: OperatorGraph
    shards: int
    steps: tuple[SearchStep, ...]
    parameters: Mapping[str, Placement]
    """Placement of each parameter and buffer."""
    cost: PlanCost
    bound: PlanCost | None = None
    """No plan costs less than this; None: this one is known to be the cheapest."""

    @property
    def gap(self) -> str:
        """How far from the cheapest plan this one may be; empty: it is the cheapest."""
        if self.bound is None:
            return ""
        if self.cost.whole > self.bound.whole:
            return f"another may leave {self.cost.whole - self.bound.whole:,} parameters fewer whole"
        if self.cost.sent_bytes <= self.bound.sent_bytes:
            return "another may have fewer collectives, or less to compute"
        saved = (self.cost.sent_bytes - self.bound.sent_bytes) / max(self.cost.sent_bytes, 1)
        return f"another may send {saved:.1%} less"

    @property
    def shards_anything(self) -> bool:
        """True if shards have parts of the parameters, or of what these are applied to."""
        sharded = any(isinstance(placement, (Shard, OnRank)) for placement in self.parameters.values())
        return sharded or any(step.strategy.share < 1 and operator_parameters(step.call) for step in self.steps)


def plan_sharding(
    graph: OperatorGraph,
    shards: int,
    rules: ShardRules = NO_RULES,
    times: OpTimes = multiplication_counts,
    fixed: Mapping[str, Placement] = NOTHING,
) -> ShardingPlan:
    """Find the cheapest plan.

    Args:
        graph: operators of the captured graph.
        shards: k.
        rules: the user's rules, which the plan keeps.
        times: times of operators, for branches that are to be given to shards; the same on all of them.
        fixed: placements that parameters have already.

    Raises:
        InputError: it can't keep the rules.
    """
    owners = graph.captured.owners
    user_rules = UserRules(rules, owners, tuple(graph.calls.values()))
    regions = place_branches(graph, shards, times, lambda call: rules.of(module_of(call, owners)) == BRANCH)
    choices = op_choices(graph, user_rules, regions, fixed)
    user_rules.check()
    best = cheapest_steps(graph, choices, shards)
    if best is None and fixed:
        raise InputError(
            f"{', '.join(sorted(fixed))}: a later stage can't divide what it shares with an earlier one as that does; "
            "write shards=1 for both, or cuts= so that one stage uses it"
        )
    if best is None:
        raise InputError(
            f"shard_rules={str(rules)!r} divide a parameter that several modules have in more than one way; write "
            "the same way for all of them"
        )
    # The search counts k-ths of a byte.
    cost = best.cost._replace(sent_bytes=best.cost.sent_bytes / shards)
    bound = None if best.bound is None else best.bound._replace(sent_bytes=best.bound.sent_bytes / shards)
    return ShardingPlan(graph, shards, best.steps, parameter_placements(best.steps), cost, bound)


def parameter_placements(steps: Iterable[SearchStep]) -> dict[str, Placement]:
    """Return the placement of each parameter and buffer under these steps."""
    placements: dict[str, Placement] = {}
    for step in steps:
        for value, placement in zip(step.call.inputs, step.strategy.inputs, strict=True):
            if value.parameter is not None:
                placements.setdefault(value.parameter, placement)
    return placements


def op_choices(
    graph: OperatorGraph,
    user_rules: "UserRules",
    regions: Sequence[PlacedRegion],
    fixed: Mapping[str, Placement] = NOTHING,
) -> list[OpChoice]:
    """Return the strategies of each operator, whatever is chosen for the others."""
    outputs: dict[ValueKey, Placements] = {}
    choices = list[OpChoice]()
    for call in graph.calls.values():
        inside = [i for i, region in enumerate(regions) if call.node in region.branch_of]
        ended = (region for region in regions if region.region.join is call.node)
        alone = [regions[i].strategy(call) for i in inside]
        strategies = [*base.replicated_strategies(call)]
        rule = base.rule_of(call.target)
        if rule is not None:
            available = [outputs.get(value.key, _WHOLE) for value in call.inputs]
            # A tensor on one rank is a term of a sum whose other terms are zero.
            available = [each | {PARTIAL} if any(isinstance(p, OnRank) for p in each) else each for each in available]
            if rule.redistributes:
                available = [each | _WHOLE for each in available]
            strategies += base.sharded_strategies(call, available)
        strategies += (strategy for region in ended for strategy in region.join_strategies(call))
        names = [str(value.parameter) for value in call.inputs]
        kept = [
            strategy
            for strategy in (*strategies, *alone)
            if all(fixed.get(name, p) == p for name, p in zip(names, strategy.inputs, strict=True))
        ]
        allowed = user_rules.allowed(call, kept)
        for index, value in enumerate(call.outputs):
            outputs[value.key] = frozenset(strategy.outputs[index] for strategy in allowed)
        apart = [strategy for strategy in allowed if strategy not in alone]
        alone = [strategy for strategy in alone if strategy in allowed]
        choices.append(OpChoice(call, apart, alone, next(iter(inside), None)))
    return choices


def module_of(call: OpCall, owners: Mapping[str, str]) -> str:
    """Return the full name of an operator's module.

    Where a module reaches into another one, as attention into its output's layer, that of the layer which holds the
    parameters.
    """
    owner = owners.get(call.node.name, "")
    prefix = f"{owner}." if owner else ""
    holders = (str(value.parameter).rpartition(".")[0] for value in operator_parameters(call))
    return next((name for name in holders if name.startswith(prefix)), owner)


def operator_parameters(call: OpCall) -> list[GraphTensor]:
    """Return the operator's inputs that are parameters of the model."""
    return [value for value in call.inputs if value.parameter is not None and value.differentiable]


def shards_a_parameter(call: OpCall, strategy: OpStrategy) -> bool:
    """Return True if a strategy shards a parameter or buffer."""
    return any(
        value.parameter is not None and isinstance(placement, (Shard, OnRank))
        for value, placement in zip(call.inputs, strategy.inputs, strict=True)
    )


def rule_strategies(call: OpCall, shards: int) -> list[OpStrategy]:
    """Return the strategies of an operator's rule for another number of shards, where all inputs are whole."""
    return list(base.sharded_strategies(replace(call, shards=shards), [_WHOLE] * len(call.inputs)))


def largest_count(call: OpCall, name: str, shards: int) -> int:
    """Return the largest number of shards below ``shards`` for which a strategy has this name; 0: none."""
    counts = range(shards - 1, 0, -1) if name else ()
    return next((k for k in counts if any(each.name == name for each in rule_strategies(call, k))), 0)


@final
@dataclass
class UserRules:
    """The user's ``shard_rules``, and the operators for which they were kept.

    A module is known by its full name. Where a module is to be sharded by name, an operator of it that has no strategy
    of that name is left to the plan, as long as another one of the module has it; "whole" replicates all of them.

    Args:
        rules: rules of the strategy.
        owners: node name -> module, as :class:`~paceline.replica.capture.capture.Captured` has it.
        calls: operators of the captured graph.

    Raises:
        InputError: a pattern that matches no module whose operators have parameters.
    """

    rules: ShardRules
    owners: Mapping[str, str]
    calls: Sequence[OpCall]
    _parameterised: list[tuple[str, OpCall]] = field(init=False)
    """Operators that have parameters, each after its module."""
    # Filled by `allowed`, read by `check` and by error messages.
    _kept: set[str] = field(default_factory=set)
    """Modules of which an operator is sharded as requested."""
    _names: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """Module -> names of its operators' strategies, as they came up."""

    def __post_init__(self) -> None:
        self._parameterised = [(module_of(c, self.owners), c) for c in self.calls if operator_parameters(c)]
        modules = {module for module, _ in self._parameterised}
        for pattern in self.rules:
            if not any(fnmatchcase(module, pattern) for module in modules):
                raise unknown("module in shard_rules", pattern, modules)

    def allowed(self, call: OpCall, strategies: Sequence[OpStrategy]) -> Sequence[OpStrategy]:
        """Return the strategies of an operator among which the plan may choose."""
        module = module_of(call, self.owners)
        requested = self.rules.of(module)
        others = [strategy for strategy in strategies if not strategy.on_request]
        if requested is None:
            return others
        if requested == WHOLE:
            if not operator_parameters(call):
                return others
            return [each for each in strategies if _WHOLE.issuperset((*each.inputs, *each.outputs))]
        self._names[module] |= {strategy.name: None for strategy in strategies if strategy.name}
        named = [strategy for strategy in strategies if strategy.name == requested]
        if named:
            self._kept.add(module)
        return named or others

    def check(self) -> None:
        """Raise InputError if no operator of a module has a strategy of the requested name; call it after all."""
        for module, call in self._parameterised:
            requested = self.rules.of(module)
            if requested not in (None, WHOLE) and module not in self._kept:
                raise self._error(module, str(requested), call)

    def _error(self, module: str, requested: str, call: OpCall) -> InputError:
        rule = f"shard_rules={{{str(self.rules.pattern(module))!r}: {requested!r}}}"
        of_module = (each for name, each in self._parameterised if name == module)
        largest = max(largest_count(each, requested, call.shards) for each in of_module)
        if largest:
            return InputError(
                f"{rule}: shards={call.shards}, but {module} can be divided by {requested} among {largest} at most; "
                f"write shards={largest}, or {WHOLE} in place of {requested}"
            )
        return InputError(
            f"{rule}: {module} ({call.node.name}) has no way {requested!r}; write one of: "
            f"{', '.join((*self._names[module], WHOLE))}"
        )
