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
from paceline.replica.tensor.base import Offers, OpCall, OpStrategy, Value, divided, rule_of, undivided
from paceline.replica.tensor.branch_on_rank import joined, on_one_shard
from paceline.replica.tensor.branches import BRANCH, Placed, Times, counted, placed
from paceline.replica.tensor.graph_ops import Operators
from paceline.replica.tensor.placements import (
    PARTIAL,
    REPLICATE,
    SHARED,
    Layout,
    OnRank,
    Replicate,
    ReplicatePartialGrad,
    Shard,
)
from paceline.replica.tensor.plan_search import Choice, SearchStep, searched
from paceline.replica.tensor.redistribute_cost import Cost, Key, Versions, key
from paceline.shard_rules import WHOLE, ShardRules

_MADE_WHOLE: frozenset[Layout] = frozenset((REPLICATE, SHARED))


def module_of(call: OpCall, owners: Mapping[str, str]) -> str:
    """The full name of an operator's module; of a module that another one reaches into, as attention into its output's
    layer, that of the layer that holds the parameters.
    """
    owner = owners.get(call.node.name, "")
    within = f"{owner}." if owner else ""
    held = (str(value.parameter).rpartition(".")[0] for value in operator_parameters(call))
    return next((name for name in held if name.startswith(within)), owner)


def operator_parameters(call: OpCall) -> list[Value]:
    """What it takes of the model's parameters."""
    return [value for value in call.takes if value.parameter is not None and value.differentiable]


def divides(call: OpCall, way: OpStrategy) -> bool:
    """Whether it divides a parameter."""
    return any(
        value.parameter is not None and isinstance(layout, (Shard, OnRank))
        for value, layout in zip(call.takes, way.takes, strict=True)
    )


def ways(call: OpCall, shards: int) -> Iterator[OpStrategy]:
    """Those that its rule has among so many shards, where all that it takes is there as a whole."""
    yield from divided(replace(call, shards=shards), [_MADE_WHOLE] * len(call.takes))


def names(call: OpCall, shards: int) -> list[str]:
    """Of those ways."""
    return list(dict.fromkeys(way.name for way in ways(call, shards) if way.name))


def most(call: OpCall, name: str, shards: int) -> int:
    """Among how many shards, below ``shards``, a way of this name divides it; 0: there is none."""
    return next((count for count in range(shards - 1, 0, -1) if name in names(call, count)), 0)


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

    def allowed(self, call: OpCall, ways: Sequence[OpStrategy]) -> Sequence[OpStrategy]:
        """Those among the ways of an operator that the plan may choose."""
        module = module_of(call, self.owners)
        asked = self.rules.of(module)
        others = [way for way in ways if not way.asked]
        if asked is None:
            return others
        if asked == WHOLE:
            return [way for way in ways if _undivided(way)] if operator_parameters(call) else others
        self._names[module] |= {way.name: None for way in ways if way.name}
        named = [way for way in ways if way.name == asked]
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
        largest = max(most(each, asked, call.shards) for each in of_module)
        if largest:
            return InputError(
                f"{said}: shards={call.shards}, but {module} can be divided by {asked} among {largest} at most; write "
                f"shards={largest}, or {WHOLE} in place of {asked}"
            )
        return InputError(
            f"{said}: {module} ({call.node.name}) has no way {asked!r}; write one of: "
            f"{', '.join((*self._names[module], WHOLE))}"
        )


def _undivided(way: OpStrategy) -> bool:
    return all(isinstance(layout, (Replicate, ReplicatePartialGrad)) for layout in (*way.takes, *way.gives))


NO_RULES = ShardRules()
NOTHING: Mapping[str, Layout] = {}


@dataclass(frozen=True)
class ShardingPlan:
    """What was chosen for all operators."""

    operators: Operators
    shards: int
    steps: tuple[SearchStep, ...]
    parameters: Mapping[str, Layout]
    """Of each parameter and buffer."""
    cost: Cost


def plan(
    operators: Operators,
    shards: int,
    rules: ShardRules = NO_RULES,
    times: Times = counted,
    fixed: Mapping[str, Layout] = NOTHING,
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
    override = UserRules(rules, operators.captured.owners, tuple(operators.calls.values()))
    open_ = choices(operators, override, placed(operators, shards, times, override.asks_for_branch), fixed)
    override.check()
    best = searched(operators, open_, shards, _common(open_)) or searched(operators, open_, shards, {})
    if best is None:
        raise override.unplanned()
    steps = tuple(best.steps())
    return ShardingPlan(operators, shards, steps, parameters(steps), best.cost._replace(sent=best.cost.sent / shards))


def choices(
    operators: Operators, override: UserRules, regions: Sequence[Placed], fixed: Mapping[str, Layout] = NOTHING
) -> list[Choice]:
    """The ways of each operator, whatever becomes of the others."""
    return list(_Choices(operators, override, regions, fixed).all())


class _Choices:
    def __init__(
        self, operators: Operators, override: UserRules, regions: Sequence[Placed], fixed: Mapping[str, Layout]
    ) -> None:
        self._operators, self._override, self._regions, self._fixed = operators, override, regions, fixed
        self._offers: dict[Key, frozenset[Layout]] = {}

    def all(self) -> Iterator[Choice]:
        for call in self._operators.calls.values():
            made = self._of(call)
            for index, value in enumerate(call.gives):
                self._offers[key(value)] = frozenset(way.gives[index] for way in (*made.ways, *made.alone))
            yield made

    def _of(self, call: OpCall) -> Choice:
        inside = [i for i, region in enumerate(self._regions) if region.branch(call.node) is not None]
        ends = [i for i, region in enumerate(self._regions) if region.region.join is call.node]
        alone = [on_one_shard(call, self._regions[i]) for i in inside]
        ways = [*self._ways(call), *(way for i in ends for way in joined(call, self._regions[i]))]
        allowed = self._override.allowed(call, [way for way in (*ways, *alone) if self._keeps(call, way)])
        return Choice(
            call,
            [way for way in allowed if way not in alone],
            [way for way in alone if way in allowed],
            next(iter(inside), None),
            next(iter(ends), None),
        )

    def _keeps(self, call: OpCall, way: OpStrategy) -> bool:
        """Whether it takes parameters as they lie already."""
        taken = zip(call.takes, way.takes, strict=True)
        return all(self._fixed.get(str(value.parameter), layout) == layout for value, layout in taken)

    def _ways(self, call: OpCall) -> Iterator[OpStrategy]:
        yield from undivided(call)
        if rule_of(call.target) is not None:
            yield from divided(call, self._given(call))

    def _given(self, call: OpCall) -> Offers:
        rule = rule_of(call.target)
        given = [self._offers.get(key(value), frozenset((REPLICATE, SHARED))) for value in call.takes]
        given = [each | {PARTIAL} if any(isinstance(o, OnRank) for o in each) else each for each in given]
        return [each | {REPLICATE, SHARED} for each in given] if rule is not None and rule.converts else given


def _common(choices: Iterable[Choice]) -> dict[Key, Versions]:
    """In which layouts a parameter can be taken by all operators that take it."""
    found: dict[Key, Versions] = {}
    for choice in choices:
        for index, value in enumerate(choice.call.takes):
            if value.parameter is not None:
                here = frozenset(way.takes[index] for way in (*choice.ways, *choice.alone))
                found[key(value)] = found.get(key(value), here) & here
    return found


def parameters(steps: Iterable[SearchStep]) -> dict[str, Layout]:
    """How each parameter and buffer lies where these steps are done."""
    found: dict[str, Layout] = {}
    for step in steps:
        for value, layout in zip(step.call.takes, step.way.takes, strict=True):
            if value.parameter is not None:
                found.setdefault(value.parameter, layout)
    return found
