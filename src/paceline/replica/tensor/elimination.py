"""Cheapest values of the variables of a cost network, by eliminating one variable after the other.

To eliminate x, the tables with x are added up and x is minimised out of the sum, which leaves one table over the other
variables of these (bucket elimination, Dechter 1999)::

    min over a, b, c of f(a, b) + g(b, c) + h(c)  =  min over a, b of f(a, b) + m(b)
    m(b) = min over c of g(b, c) + h(c)

The largest such sum decides the time; the order in which the fewest variables meet for the first time (min-fill) keeps
it small. Equal tables are one, so that layers which repeat are eliminated once.

A sum that would have too many entries is several sums, of fewer tables each, out of which x is minimised one by one:
what comes of it is a lower bound (mini-buckets, Dechter and Rish 2003). Then one such x is fixed to one value after the
other, until the cheapest is known or enough entries have been computed: their number alone decides, so that all shards
find the same.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import TypeAlias

import numpy as np

from paceline.core.errors import InputError
from paceline.replica.tensor.cost_network import IMPOSSIBLE, CostNetwork, CostTable, Factor, Numbers

# Entries of the largest sum of tables, of 24 bytes each.
LARGEST_TABLE = 1 << 20

# Entries computed before no other values are tried, and sums are kept to few entries: about two seconds.
LARGEST_EFFORT = 1 << 25

# Of the entries of a sum, how many times fewer once the effort has been made.
_FEWER = 256

# Times the effort that is made until any values are found at all.
_LONGER = 8

# Entries for which one could have been computed in the time that eliminating a variable takes besides.
_OVERHEAD = 1000

# Index of some entries of a table.
Index: TypeAlias = tuple[int | slice, ...]

_ZERO: Numbers = (0, 0, 0)
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class CheapestValues:
    """The cheapest values that were found."""

    values: Mapping[int, int]
    """Value of each variable that has more than one."""
    cost: Numbers
    bound: Numbers
    """None cost less than this; it is the cost where they are known to be the cheapest."""


def cheapest_values(
    network: CostNetwork, largest_table: int = LARGEST_TABLE, largest_effort: int = LARGEST_EFFORT
) -> CheapestValues | None:
    """Return the cheapest values, as far as the effort goes; None: none are possible.

    Args:
        network: variables and tables.
        largest_table: entries of the largest sum of tables.
        largest_effort: entries after which no other values are tried.

    Raises:
        InputError: none were found, though some may be possible.
    """
    search = _Search(network, _Tables(largest_table, largest_effort))
    bound = search.descend({})
    if search.best is None:
        if not search.complete:
            raise InputError(
                f"no plan was found for the {len(network.factors)} operators and tensors of the model; write "
                "shard_rules that leave fewer choices, or fewer shards"
            )
        return None
    values, cost = search.best
    return CheapestValues(values, cost, cost if search.complete else bound)


class _Search:
    """Depth-first search over values of those variables whose sums are too large (branch and bound)."""

    def __init__(self, network: CostNetwork, tables: "_Tables") -> None:
        self._network, self._tables = network, tables
        self.best: tuple[Mapping[int, int], Numbers] | None = None
        self.complete = True
        """True if nothing was left out that may be cheaper than the best."""

    def descend(self, fixed: Mapping[int, int]) -> Numbers:
        """Look at the values where some are fixed; return a lower bound of their costs."""
        elimination = self._elimination(fixed)
        bound = elimination.bound
        if not self._may_win(bound) or not elimination.split:
            return bound
        likely = elimination.values()
        self._dive(fixed, elimination.split, likely)
        variable = elimination.split[0]
        # The value that the bound's tables have as the cheapest first.
        for value in sorted(range(self._network.sizes[variable]), key=lambda each: each != likely[variable]):
            if self._tables.effort >= self._tables.largest_effort * (_LONGER if self.best is None else 1):
                self.complete = False
                break
            if self._may_win(bound):
                self.descend({**fixed, variable: value})
        return bound

    def _dive(self, fixed: Mapping[int, int], split: Sequence[int], likely: Mapping[int, int]) -> None:
        """Fix all variables whose sums are too large at once, until none is: quick, but it may lead nowhere."""
        while split:
            fixed = {**fixed, **{variable: likely[variable] for variable in split}}
            elimination = self._elimination(fixed)
            if not self._may_win(elimination.bound):
                return
            split, likely = elimination.split, elimination.values()

    def _elimination(self, fixed: Mapping[int, int]) -> "_Elimination":
        """Eliminate all variables but the fixed ones; where no sum was too large that is the least cost with these."""
        elimination = _Elimination(self._network, self._tables, fixed)
        if not elimination.split and self._may_win(elimination.bound):
            self.best = elimination.values(), elimination.bound
        return elimination

    def _may_win(self, bound: Numbers) -> bool:
        return bound[0] < IMPOSSIBLE and (self.best is None or bound < self.best[1])


@dataclass
class _Tables:
    """Tables, each once, and what comes of eliminating a variable of some of them."""

    largest_table: int
    largest_effort: int
    effort: int = 0
    """Entries computed so far."""
    known: list[CostTable] = field(default_factory=list)
    _numbers: dict[tuple[bytes, tuple[int, ...]], int] = field(default_factory=dict)
    """(digest of the entries, shape) -> number."""
    _results: dict[object, tuple[int, Numbers]] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """Entries that a sum may have now."""
        return self.largest_table if self.effort < self.largest_effort else max(1, self.largest_table // _FEWER)

    def number(self, table: CostTable) -> int:
        """Return the number of a table, the same for equal ones."""
        table = np.ascontiguousarray(table)
        key = blake2b(table.data, digest_size=16).digest(), table.shape
        if key not in self._numbers:
            self._numbers[key] = len(self.known)
            self.known.append(table)
        return self._numbers[key]

    def minimised(self, terms: Sequence[tuple[int, tuple[int, ...]]], sizes: tuple[int, ...]) -> tuple[int, Numbers]:
        """Minimise the last variable out of a sum.

        Args:
            terms: (number of a table, which of the sum's variables it has) of each.
            sizes: number of values of each variable of the sum.

        Returns:
            The number of the table over the other variables, and a cost to be added to all its entries.
        """
        self.effort += _OVERHEAD
        key = tuple(sorted(terms)), sizes
        if key not in self._results:
            self.effort += prod(sizes)
            total = np.zeros((3, *sizes), np.int64)
            for number, variables in terms:
                total += self.known[number].reshape(3, *(n if i in variables else 1 for i, n in enumerate(sizes)))
            least = _least(total)
            # Layers that are alike end up with equal tables once their own costs are taken off.
            flat = least.reshape(3, -1)
            _, constant = first_least(flat)
            possible = least[0] < IMPOSSIBLE
            offset = np.array(constant).reshape(3, *(1 for _ in sizes[1:]))
            impossible = np.array((IMPOSSIBLE, 0, 0)).reshape(offset.shape)
            normal = np.where(possible, least - offset, impossible)
            self._results[key] = self.number(normal), constant
        return self._results[key]


class _Elimination:
    """Elimination of all variables with some fixed; the sum of what is left is ``bound``."""

    def __init__(self, network: CostNetwork, tables: _Tables, fixed: Mapping[int, int]) -> None:
        self._tables, self.bound = tables, _ZERO
        self.split = list[int]()
        """Variables of which the sum was too large; where there are none the bound is the least cost."""
        self._sizes = network.sizes
        self._fixed = {v: 0 for v, size in enumerate(network.sizes) if size == 1} | dict(fixed)
        scopes = [tuple(v for v in factor.variables if v not in self._fixed) for factor in network.factors]
        self._order = elimination_order(scopes, network.sizes)
        self._position = {variable: i for i, variable in enumerate(self._order)}
        self._buckets: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        """First variable that is eliminated -> (variables, number) of the tables with it."""
        for factor in network.factors:
            self._add(*self._reduced(factor))
        for variable in self._order:
            self._eliminate(variable)
            if self.bound[0] >= IMPOSSIBLE:
                break

    def values(self) -> dict[int, int]:
        """Return the value of each variable: the cheapest, given those of the variables that are eliminated later."""
        values = dict(self._fixed)
        for variable in reversed(self._order):
            costs = np.zeros((3, self._sizes[variable]), np.int64)
            for scope, number in self._buckets[variable]:
                index: Index = (slice(None), *(values[v] for v in scope[:-1]))
                costs += self._tables.known[number][index]
            values[variable], _ = first_least(costs)
        return values

    def _reduced(self, factor: Factor) -> tuple[tuple[int, ...], CostTable]:
        """Return a table over the variables that are not fixed, the one that is eliminated first as the last."""
        index: Index = (slice(None), *(self._fixed.get(v, slice(None)) for v in factor.variables))
        table = factor.table[index]
        free = [v for v in factor.variables if v not in self._fixed]
        axes = sorted(range(len(free)), key=lambda axis: -self._position[free[axis]])
        return tuple(free[axis] for axis in axes), table.transpose(0, *(axis + 1 for axis in axes))

    def _add(self, scope: tuple[int, ...], table: CostTable) -> None:
        if scope:
            self._buckets[scope[-1]].append((scope, self._tables.number(table)))
        else:
            self._add_to_bound(first_least(table.reshape(3, 1))[1])

    def _add_to_bound(self, cost: Numbers) -> None:
        self.bound = (self.bound[0] + cost[0], self.bound[1] + cost[1], self.bound[2] + cost[2])

    def _eliminate(self, variable: int) -> None:
        groups = list(self._groups(self._buckets[variable]))
        if len(groups) > 1:
            self.split.append(variable)
        for group in groups:
            together = {v for scope, _ in group for v in scope}
            scope = tuple(sorted(together, key=lambda v: -self._position[v]))
            index = {v: i for i, v in enumerate(scope)}
            terms = [(number, tuple(index[v] for v in of_table)) for of_table, number in group]
            number, constant = self._tables.minimised(terms, tuple(self._sizes[v] for v in scope))
            self._add_to_bound(constant)
            if len(scope) > 1:
                self._buckets[scope[-2]].append((scope[:-1], number))

    def _groups(self, bucket: Sequence[tuple[tuple[int, ...], int]]) -> Iterator[list[tuple[tuple[int, ...], int]]]:
        """Divide tables into groups whose sums are not too large: one, if possible."""
        if self._entries({v for scope, _ in bucket for v in scope}) <= self._tables.largest:
            yield list(bucket)
            return
        groups = list[tuple[set[int], list[tuple[tuple[int, ...], int]]]]()
        for scope, number in sorted(bucket, key=lambda each: -self._entries(each[0])):
            for together, group in groups:
                if self._entries(together | set(scope)) <= self._tables.largest:
                    together.update(scope)
                    group.append((scope, number))
                    break
            else:
                groups.append((set(scope), [(scope, number)]))
        yield from (group for _, group in groups)

    def _entries(self, variables: Iterable[int]) -> int:
        return prod(self._sizes[v] for v in variables)


def elimination_order(scopes: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return the order in which variables are eliminated: the one next whose neighbours lack the fewest pairs.

    Args:
        scopes: variables of each table.
        sizes: number of values of each variable; of variables that lack as many pairs, the one with the smallest sum.

    >>> elimination_order([(0, 1), (0, 2), (0, 3)], [2, 2, 2, 2])
    [1, 2, 0, 3]
    """
    neighbours: dict[int, set[int]] = {v: set() for scope in scopes for v in scope}
    for scope in scopes:
        for v in scope:
            neighbours[v].update(w for w in scope if w != v)

    def rank(v: int) -> tuple[int, int, int]:
        around = neighbours[v]
        pairs = sum(len(around) - 1 - len(around & neighbours[w]) for w in around) // 2
        return pairs, prod(sizes[w] for w in around) * sizes[v], v

    ranks = {v: rank(v) for v in neighbours}
    waiting, order = sorted(ranks.values()), list[int]()
    while waiting:
        each = heapq.heappop(waiting)
        v = each[2]
        if ranks.get(v) != each:  # it has got another rank since
            continue
        order.append(v)
        del ranks[v]
        around = neighbours.pop(v)
        for w in around:
            neighbours[w] = (neighbours[w] | around) - {v, w}
        for w in set.union(around, *(neighbours[w] for w in around)):
            if (new := rank(w)) != ranks[w]:
                ranks[w] = new
                heapq.heappush(waiting, new)
    return order


def first_least(costs: CostTable) -> tuple[int, Numbers]:
    """Return the first index of the least of a row of costs, and that cost."""
    indices = np.arange(costs.shape[1])
    for row in costs:
        of_row = row[indices]
        indices = indices[of_row == of_row.min()]
    index = int(indices[0])
    first, second, third = costs[:, index].tolist()
    return index, (first, second, third)


def _least(costs: CostTable) -> CostTable:
    """Return the least costs along the last dim."""
    first = costs[0].min(-1)
    second = np.where(costs[0] == first[..., None], costs[1], _NEVER)
    least = second.min(-1)
    third = np.where(second == least[..., None], costs[2], _NEVER)
    return np.stack([first, least, third.min(-1)])
