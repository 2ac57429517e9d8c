"""Which way each operator is divided: the one by which the fewest bytes are sent, exactly.

What is compared is, first the elements of weights that are left whole, then bytes that a shard sends forward and
backward, then the work of the shard that has most (:mod:`paceline.replica.tensor.search`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.replica.tensor.alone import joined, on_one_shard
from paceline.replica.tensor.base import Call, Offers, Way, divided, rule_of, undivided
from paceline.replica.tensor.branches import Placed, Times, counted, placed
from paceline.replica.tensor.calls import Operators
from paceline.replica.tensor.costs import Cost, Key, Versions, key
from paceline.replica.tensor.layouts import PARTIAL, SHARED, WHOLE, Layout, Owned
from paceline.replica.tensor.override import Override
from paceline.replica.tensor.search import Choice, Step, searched
from paceline.shard_rules import ShardRules

NO_RULES = ShardRules()
NOTHING: Mapping[str, Layout] = {}


@dataclass(frozen=True)
class Plan:
    """What was chosen for all operators."""

    operators: Operators
    shards: int
    steps: tuple[Step, ...]
    parameters: Mapping[str, Layout]
    """Of each parameter and buffer."""
    cost: Cost


def plan(
    operators: Operators,
    shards: int,
    rules: ShardRules = NO_RULES,
    times: Times = counted,
    fixed: Mapping[str, Layout] = NOTHING,
) -> Plan:
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
    override = Override(rules, operators.captured.owners, tuple(operators.calls.values()))
    open_ = choices(operators, override, placed(operators, shards, times, override.asks_for_branch), fixed)
    override.check()
    best = searched(operators, open_, shards, _common(open_)) or searched(operators, open_, shards, {})
    if best is None:
        raise override.unplanned()
    steps = tuple(best.steps())
    return Plan(operators, shards, steps, parameters(steps), best.cost._replace(sent=best.cost.sent / shards))


def choices(
    operators: Operators, override: Override, regions: Sequence[Placed], fixed: Mapping[str, Layout] = NOTHING
) -> list[Choice]:
    """The ways of each operator, whatever becomes of the others."""
    return list(_Choices(operators, override, regions, fixed).all())


class _Choices:
    def __init__(
        self, operators: Operators, override: Override, regions: Sequence[Placed], fixed: Mapping[str, Layout]
    ) -> None:
        self._operators, self._override, self._regions, self._fixed = operators, override, regions, fixed
        self._offers: dict[Key, frozenset[Layout]] = {}

    def all(self) -> Iterator[Choice]:
        for call in self._operators.calls.values():
            made = self._of(call)
            for index, value in enumerate(call.gives):
                self._offers[key(value)] = frozenset(way.gives[index] for way in (*made.ways, *made.alone))
            yield made

    def _of(self, call: Call) -> Choice:
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

    def _keeps(self, call: Call, way: Way) -> bool:
        """Whether it takes parameters as they lie already."""
        taken = zip(call.takes, way.takes, strict=True)
        return all(self._fixed.get(str(value.parameter), layout) == layout for value, layout in taken)

    def _ways(self, call: Call) -> Iterator[Way]:
        yield from undivided(call)
        if rule_of(call.target) is not None:
            yield from divided(call, self._given(call))

    def _given(self, call: Call) -> Offers:
        rule = rule_of(call.target)
        given = [self._offers.get(key(value), frozenset((WHOLE, SHARED))) for value in call.takes]
        given = [each | {PARTIAL} if any(isinstance(o, Owned) for o in each) else each for each in given]
        return [each | {WHOLE, SHARED} for each in given] if rule is not None and rule.converts else given


def _common(choices: Iterable[Choice]) -> dict[Key, Versions]:
    """In which layouts a parameter can be taken by all operators that take it."""
    found: dict[Key, Versions] = {}
    for choice in choices:
        for index, value in enumerate(choice.call.takes):
            if value.parameter is not None:
                here = frozenset(way.takes[index] for way in (*choice.ways, *choice.alone))
                found[key(value)] = found.get(key(value), here) & here
    return found


def parameters(steps: Iterable[Step]) -> dict[str, Layout]:
    """How each parameter and buffer lies where these steps are done."""
    found: dict[str, Layout] = {}
    for step in steps:
        for value, layout in zip(step.call.takes, step.way.takes, strict=True):
            if value.parameter is not None:
                found.setdefault(value.parameter, layout)
    return found
