"""Which way each operator is divided: the one by which the fewest bytes are sent, exactly.

Goes through the graph in its order and keeps, for each way in which the tensors that are still needed may lie, the
cheapest way to get there (dynamic programming). What is compared is, first the elements of weights that are left whole,
then bytes that a shard sends forward and backward, then the work of the shard that has most.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TypeAlias

from paceline.replica.tensor.base import Call, Value, Way, divided, rule_of, undivided
from paceline.replica.tensor.calls import Operators
from paceline.replica.tensor.costs import Conversion, Cost, Key, Versions, converted_from, key, taken
from paceline.replica.tensor.layouts import SHARED, WHOLE, Layout
from paceline.replica.tensor.override import Override
from paceline.replica.tensor.work import work
from paceline.shard_rules import ShardRules

NO_RULES = ShardRules()


@dataclass(frozen=True)
class Step:
    """What was chosen for one operator."""

    call: Call
    way: Way
    converted: tuple[Conversion, ...]
    """(tensor, from, to) of what has to be converted for it, and was not before."""


@dataclass(frozen=True)
class Plan:
    """What was chosen for all of them."""

    operators: Operators
    shards: int
    steps: tuple[Step, ...]
    parameters: Mapping[str, Layout]
    """Of each parameter and buffer."""
    cost: Cost


@dataclass(frozen=True)
class _Path:
    """The cheapest way to a state."""

    cost: Cost
    step: Step | None
    before: "_Path | None"


_State: TypeAlias = tuple[tuple[Key, Versions], ...]


def plan(operators: Operators, shards: int, rules: ShardRules = NO_RULES) -> Plan:
    """The cheapest.

    Args:
        operators: of the captured graph.
        shards: k.
        rules: what it has to keep to.

    Raises:
        InputError: it can't keep to them.
    """
    override = Override(rules, operators.captured.owners, tuple(operators.calls.values()))
    choices = list(_choices(operators, override))
    override.check()
    paths = _searched(operators, choices, shards, _common(choices)) or _searched(operators, choices, shards, {})
    if not paths:
        raise override.unplanned()
    best = min((_ended(path, state, operators, shards) for state, path in paths.items()), key=lambda path: path.cost)
    steps = tuple(reversed(list(_back(best))))
    return Plan(operators, shards, steps, _parameters(steps), best.cost._replace(sent=best.cost.sent / shards))


_Choice: TypeAlias = tuple[Call, Sequence[Way]]


def _choices(operators: Operators, override: Override) -> Iterator[_Choice]:
    """The ways of each operator, whatever becomes of the others."""
    offers: dict[Key, frozenset[Layout]] = {}
    for call in operators.calls.values():
        ways = override.allowed(call, list(_ways(call, offers)))
        for index, value in enumerate(call.gives):
            offers[key(value)] = frozenset(way.gives[index] for way in ways)
        yield call, ways


def _common(choices: Iterable[_Choice]) -> dict[Key, Versions]:
    """In which layouts a parameter can be taken by all operators that take it."""
    found: dict[Key, Versions] = {}
    for call, ways in choices:
        for index, value in enumerate(call.takes):
            if value.parameter is not None:
                here = frozenset(way.takes[index] for way in ways)
                found[key(value)] = found.get(key(value), here) & here
    return found


def _searched(
    operators: Operators, choices: Iterable[_Choice], shards: int, common: Mapping[Key, Versions]
) -> dict[_State, _Path]:
    """The cheapest way to each state in the end; none where ``common`` has promised too much."""
    last = _last_uses(operators)
    values = {key(value): value for given in operators.values.values() for value in given}
    paths: dict[_State, _Path] = {(): _Path(Cost(), None, None)}
    for call, ways in choices:
        paths = _onward(paths, call, ways, last)
        if not paths:
            break
        paths = _worthwhile(paths, values, shards, common)
    return paths


def _ways(call: Call, offers: Mapping[Key, frozenset[Layout]]) -> Iterator[Way]:
    yield from undivided(call)
    rule = rule_of(call.target)
    if rule is not None:
        given = [offers.get(key(value), frozenset((WHOLE, SHARED))) for value in call.takes]
        if rule.converts:
            given = [each | {WHOLE, SHARED} for each in given]
        yield from divided(call, given)


def _last_uses(operators: Operators) -> dict[Key, Call | None]:
    """The operator after which a tensor is no longer needed; None: it is an output."""
    found: dict[Key, Call | None] = {}
    for call in operators.calls.values():
        for value in call.takes:
            found[key(value)] = call
    for value in outputs(operators):
        found[key(value)] = None
    return found


def outputs(operators: Operators) -> list[Value]:
    """The tensors that the graph returns."""
    output = next(iter(reversed(operators.captured.module.graph.nodes)))
    return [value for node in output.all_input_nodes for value in operators.values.get(node, ())]


def _onward(
    paths: Mapping[_State, _Path], call: Call, ways: Sequence[Way], last: Mapping[Key, Call | None]
) -> dict[_State, _Path]:
    found: dict[_State, _Path] = {}
    known: dict[tuple[Versions | None, ...], list[_Taken]] = {}
    places = [key(value) for value in call.takes]
    ended = {place for place in places if last[place] is call}
    for state, path in paths.items():
        there = dict(state)
        inputs = tuple(map(there.get, places))
        if inputs not in known:
            known[inputs] = list(_all_taken(call, _followed(call, ways, there, last), there, last))
        for each in known[inputs]:
            cost, after = path.cost + each.cost, {**there, **each.there}
            left = tuple(item for item in after.items() if item[0] not in ended)
            best = found.get(left)
            if best is None or cost < best.cost:
                found[left] = _Path(cost, each.step, path)
    return found


@dataclass(frozen=True)
class _Taken:
    """One way, from one state of what it takes."""

    cost: Cost
    step: Step
    there: Mapping[Key, Versions]
    """What is there afterwards that is needed, of what it takes and gives."""


def _all_taken(
    call: Call, ways: Sequence[Way], there: Mapping[Key, Versions], last: Mapping[Key, Call | None]
) -> Iterator[_Taken]:
    done = work(call)
    for way in ways:
        had = taken(call, way, there)
        if had is not None:
            cost, converted, versions = had
            made = {
                key(v): frozenset((layout,)) for v, layout in zip(call.gives, way.gives, strict=True) if key(v) in last
            }
            own = Cost(0, round(way.sent * call.shards), way.collectives, done * way.share)
            yield _Taken(cost + own, Step(call, way, converted), versions | made)


def _followed(
    call: Call, ways: Sequence[Way], there: Mapping[Key, Versions], last: Mapping[Key, Call | None]
) -> Sequence[Way]:
    """What alone takes one tensor and gives one as large takes it as it is, if it can: it may be converted after."""
    rule = rule_of(call.target)
    filled = [index for index, value in enumerate(call.takes) if value.nbytes]
    if rule is None or rule.converts or len(filled) != 1 or key(call.takes[filled[0]]) not in there:
        return ways
    value = call.takes[filled[0]]
    alone = len(call.gives) == 1 and call.gives[0].nbytes == value.nbytes and last.get(key(value)) is call
    if not alone and call.target is not getitem:
        return ways
    return [way for way in ways if way.takes[filled[0]] in there[key(value)]] or ways


def _worthwhile(
    paths: Mapping[_State, _Path], values: Mapping[Key, Value], shards: int, common: Mapping[Key, Versions]
) -> dict[_State, _Path]:
    """Without those that the cheapest one is no worse than even if it converts all that they have as they have it.

    A parameter is never converted. But where all that take it can take it as the cheapest one has it, no bytes weigh up
    that another leaves more weights whole.
    """
    cheapest, path = min(paths.items(), key=lambda item: item[1].cost)
    there = dict(cheapest)

    def worthwhile(state: _State, other: _Path) -> bool:
        cost = path.cost
        for place, versions in state:
            for layout in versions:
                if layout not in there[place]:
                    found = converted_from(values[place], there[place], layout, shards)
                    if found is not None:
                        cost += found[1]
                    elif cost.whole >= other.cost.whole or not there[place] <= common.get(place, frozenset()):
                        return True
            if cost > other.cost:
                return True
        return False

    return {s: p for s, p in paths.items() if p is path or worthwhile(s, p)}


def _ended(path: _Path, state: _State, operators: Operators, shards: int) -> _Path:
    """With all outputs whole."""
    there = dict(state)
    for value in outputs(operators):
        known = there.get(key(value), frozenset((WHOLE,)))
        if WHOLE in known or value.parameter is not None:
            continue
        found = converted_from(value, known, WHOLE, shards)
        if found is None:
            return _Path(Cost(2**62), path.step, path.before)
        path = _Path(path.cost + found[1], path.step, path.before)
    return path


def _back(path: _Path | None) -> Iterator[Step]:
    while path is not None and path.step is not None:
        yield path.step
        path = path.before


def _parameters(steps: Iterable[Step]) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    for step in steps:
        for value, layout in zip(step.call.takes, step.way.takes, strict=True):
            if value.parameter is not None:
                found.setdefault(value.parameter, layout)
    return found
