"""Choices of a plan as variables, and its cost as a sum of tables over a few of them each.

The strategy of each operator is a variable. Where a tensor has several users, which placements it has after each of
them is one as well, since a later user takes what an earlier one had redistributed::

    y = f(x), first user g, second user h:      cost(f) + cost(f, g, placements of y) + cost(placements of y, h)

Placements from which all that later users take costs the same are one value of such a variable. A parameter has one
placement for all its users, and branches of a region are all on one shard each or none is: two more kinds.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.replica.tensor.base import GraphTensor, OpCall, OpStrategy
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import REPLICATE, Placement
from paceline.replica.tensor.redistribute import (
    Placements,
    PlanCost,
    ValueKey,
    cheapest_redistribution,
    parameter_cost,
)

# Costs of the assignments of some variables: first the three numbers that are compared in turn, then a dim for each.
CostTable: TypeAlias = NDArray[np.int64]

# One such cost.
Numbers: TypeAlias = tuple[int, int, int]

# Weights that count as many as an assignment that is impossible: sums of a hundred thousand fit into 64 bits.
IMPOSSIBLE = 1 << 45

_IMPOSSIBLE: Numbers = (IMPOSSIBLE, 0, 0)

# Bits for the number of collectives, below the bytes.
_COLLECTIVE_BITS = 16


@dataclass(frozen=True)
class OpChoice:
    """Strategies that are open for one operator."""

    call: OpCall
    strategies: Sequence[OpStrategy]
    alone: Sequence[OpStrategy] = ()
    """Strategies instead of these, where its branch is on one shard."""
    region: int | None = None
    """Region of branches that it belongs to."""

    @cached_property
    def every(self) -> tuple[OpStrategy, ...]:
        """All of them."""
        return (*self.strategies, *self.alone)


@dataclass(frozen=True)
class Factor:
    """A table of costs."""

    variables: tuple[int, ...]
    table: CostTable
    """Costs, by the values of the variables in order."""


@dataclass(frozen=True)
class CostNetwork:
    """Variables and the tables whose sum is the cost of a plan."""

    sizes: Sequence[int]
    """Number of values of each variable. The first variables are the strategies of the operators, in order."""
    factors: Sequence[Factor]


def cost_numbers(cost: PlanCost) -> Numbers:
    """Return a cost as whole numbers that are compared in turn: weights, bytes with collectives, work."""
    return cost.whole, (round(cost.sent_bytes) << _COLLECTIVE_BITS) + cost.collectives, round(cost.work)


def plan_cost(numbers: Numbers) -> PlanCost:
    """Return the cost that whole numbers stand for.

    >>> plan_cost(cost_numbers(PlanCost(3, 20, 2, 7)))
    PlanCost(whole=3, sent_bytes=20, collectives=2, work=7)
    """
    whole, sent, work = numbers
    return PlanCost(whole, sent >> _COLLECTIVE_BITS, sent & ((1 << _COLLECTIVE_BITS) - 1), work)


def cost_network(graph: OperatorGraph, choices: Sequence[OpChoice], shards: int) -> CostNetwork:
    """Return the variables and tables of a graph.

    Args:
        graph: operators of the captured graph.
        choices: strategies of each of them, in order.
        shards: k.
    """
    builder = _Builder(graph, choices, shards)
    builder.add_operators()
    builder.add_values()
    return CostNetwork(builder.sizes, builder.factors)


class _Builder:
    def __init__(self, graph: OperatorGraph, choices: Sequence[OpChoice], shards: int) -> None:
        self._choices, self._shards = choices, shards
        self.sizes, self.factors = [len(choice.every) for choice in choices], list[Factor]()
        self._outputs = [value for value in graph.outputs() if value.parameter is None]
        self._users: dict[ValueKey, list[tuple[int, int]]] = defaultdict(list)
        """(operator, index of its input) of each user."""
        for i, choice in enumerate(choices):
            for index, value in enumerate(choice.call.inputs):
                self._users[value.key].append((i, index))
        self._redistribution_costs: dict[Hashable, Numbers] = {}

    def add_operators(self) -> None:
        """Add what strategies cost by themselves, and that all operators of a region have the same mode."""
        modes = dict[int, int]()
        for i, choice in enumerate(self._choices):
            call = choice.call
            costs = [
                PlanCost(0, round(each.sent_bytes * call.shards), each.collectives, op_work(call) * each.share)
                for each in choice.every
            ]
            self._add((i,), _table(map(cost_numbers, costs)))
            if choice.region is not None:
                if choice.region not in modes:
                    modes[choice.region] = self._variable(2)
                alone = [j >= len(choice.strategies) for j in range(len(choice.every))]
                self._add((modes[choice.region], i), _possible([[not each for each in alone], alone]))

    def add_values(self) -> None:
        """Add what it costs to have each tensor where its users take it."""
        producers = {value.key: i for i, choice in enumerate(self._choices) for value in choice.call.outputs}
        values = {value.key: value for choice in self._choices for value in choice.call.inputs}
        outputs = {value.key: value for value in self._outputs}
        known: dict[Hashable, Sequence[CostTable]] = {}
        for key, value in (values | outputs).items():
            if value.parameter is not None:
                self._add_parameter(value)
                continue
            producer = producers.get(key)
            made = (REPLICATE,) if producer is None else self._placements(producer, value.index, outputs=True)
            taken = tuple(self._placements(i, index) for i, index in self._users[key])
            # Tensors that are alike have the same tables.
            like = made, taken, key in outputs, value.nbytes, value.differentiable
            if like not in known:
                known[like] = self._tables(value, made, taken)
            self._add_computed(key, producer, known[like])

    def _add(self, variables: tuple[int, ...], table: CostTable) -> None:
        self.factors.append(Factor(variables, table))

    def _variable(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _placements(self, operator: int, index: int, *, outputs: bool = False) -> tuple[Placement, ...]:
        """Return the placement of an input, or of an output, by an operator's strategy."""
        every = self._choices[operator].every
        return tuple((each.outputs if outputs else each.inputs)[index] for each in every)

    def _add_parameter(self, value: GraphTensor) -> None:
        """Add a parameter: the first user pays for its placement, and the others take the same."""
        users = self._users[value.key]
        taken = [self._placements(i, index) for i, index in users]
        costs = [parameter_cost(value, placement, self._shards) for placement in taken[0]]
        self._add((users[0][0],), _table(_IMPOSSIBLE if each is None else cost_numbers(each) for each in costs))
        if len(users) > 1:
            placements = list(dict.fromkeys(taken[0]))
            variable = self._variable(len(placements))
            for (i, _), of_user in zip(users, taken, strict=True):
                self._add((variable, i), _possible([[each == one for each in of_user] for one in placements]))

    def _add_computed(self, key: ValueKey, producer: int | None, tables: Sequence[CostTable]) -> None:
        """Add a tensor's tables: (before, user, after) of each user, the last without after; (before) at the end."""
        before = producer
        users = [i for i, _ in self._users[key]]
        for n, table in enumerate(tables):
            known = (*(() if before is None else (before,)), *users[n : n + 1])
            of_known = table[:, 0] if before is None else table
            if of_known.ndim - 1 > len(known):
                before = self._variable(of_known.shape[-1])
                known = (*known, before)
            self._add(known, of_known)

    def _tables(
        self, value: GraphTensor, made: Sequence[Placement], taken: Sequence[Sequence[Placement]]
    ) -> list[CostTable]:
        """Return the tables of a tensor.

        Args:
            value: the tensor.
            made: its placement by its producer's strategy.
            taken: of each user, the placement that it takes by its strategy.
        """
        at_end = [REPLICATE] if value.key in {each.key for each in self._outputs} else []
        tables, states = list[CostTable](), [frozenset((placement,)) for placement in made]
        for n, of_user in enumerate(taken):
            targets = list(dict.fromkeys(chain(*taken[n + 1 :], at_end)))
            after = dict[Hashable, Placements]()
            entries = dict[tuple[int, int, int], Numbers]()
            numbers = dict[Hashable, int]()
            for a, state in enumerate(states):
                for s, target in enumerate(of_user):
                    cost = self._redistribution_cost(value, state, target)
                    if cost != _IMPOSSIBLE:
                        present = state | {target}
                        # States are one if all that may be wanted later costs the same.
                        like = tuple(self._redistribution_cost(value, present, each) for each in targets)
                        after.setdefault(like, present)
                        entries[a, s, numbers.setdefault(like, len(numbers))] = cost
            table = _impossible(len(states), len(of_user), len(after))
            for (a, s, b), cost in entries.items():
                table[:, a, s, b] = cost
            tables.append(table if targets else table.min(-1))
            states = list(after.values())
        if at_end:
            tables.append(_table(self._redistribution_cost(value, state, REPLICATE) for state in states))
        return tables

    def _redistribution_cost(self, value: GraphTensor, sources: Placements, target: Placement) -> Numbers:
        if target in sources:
            return 0, 0, 0
        key = value.nbytes, value.differentiable, sources, target
        if key not in self._redistribution_costs:
            cheapest = cheapest_redistribution(value, sources, target, self._shards)
            self._redistribution_costs[key] = _IMPOSSIBLE if cheapest is None else cost_numbers(cheapest[1])
        return self._redistribution_costs[key]


def _table(costs: Iterable[Numbers]) -> CostTable:
    """Return the table of one variable."""
    return np.array(list(costs), np.int64).reshape(-1, 3).T


def _impossible(*sizes: int) -> CostTable:
    table = np.zeros((3, *sizes), np.int64)
    table[0] = IMPOSSIBLE
    return table


def _possible(rows: Sequence[Sequence[bool]]) -> CostTable:
    """Return a table of two variables that costs nothing where they fit."""
    table = _impossible(len(rows), len(rows[0]))
    table[0][np.array(rows)] = 0
    return table
