"""The cheapest values of random cost networks, against all values one by one."""

from itertools import product

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.replica.tensor import elimination
from paceline.replica.tensor.cost_network import IMPOSSIBLE, CostNetwork, Factor
from paceline.replica.tensor.elimination import cheapest_values


def drawn(seed: int, variables: int = 7, factors: int = 12) -> CostNetwork:
    """Tables over one to three variables with few distinct costs, so that some are equal, and a fifth impossible."""
    generator = np.random.default_rng(seed)
    sizes = [int(n) for n in generator.integers(1, 4, variables)]
    made = list[Factor]()
    for _ in range(factors):
        scope = generator.choice(variables, int(generator.integers(1, 4)), replace=False)
        shape = tuple(sizes[v] for v in scope)
        table = generator.integers(0, 3, (3, *shape)).astype(np.int64)
        if len(scope) > 1:
            never = generator.random(shape) < 0.2
            table[:, never] = np.array((IMPOSSIBLE, 0, 0))[:, None]
        made.append(Factor(tuple(int(v) for v in scope), table))
    return CostNetwork(sizes, made)


def cost_of(network: CostNetwork, values: tuple[int, ...]) -> tuple[int, ...]:
    total = np.zeros(3, np.int64)
    for factor in network.factors:
        total += factor.table[(slice(None), *(values[v] for v in factor.variables))]
    return tuple(total.tolist())


def cheapest(network: CostNetwork) -> tuple[int, ...] | None:
    cost = min(cost_of(network, values) for values in product(*map(range, network.sizes)))
    return cost if cost[0] < IMPOSSIBLE else None


SEEDS = range(60)


@pytest.mark.parametrize("largest_table", [1 << 20, 30, 6, 1])
def test_none_cost_less(largest_table: int) -> None:
    """However small the sums of tables have to be: then values are fixed one by one."""
    found = impossible = 0
    for seed in SEEDS:
        network = drawn(seed)
        made, best = cheapest_values(network, largest_table), cheapest(network)
        if best is None:
            assert made is None, seed
            impossible += 1
            continue
        assert made is not None, seed
        assert made.cost == made.bound == best, seed
        values = tuple(made.values.get(v, 0) for v in range(len(network.sizes)))
        assert cost_of(network, values) == best, seed
        found += 1
    assert min(found, impossible) > 3, "both were tried"


def test_with_little_effort_the_bound_holds() -> None:
    gaps = 0
    for seed in SEEDS:
        network = drawn(seed, variables=9, factors=16)
        best = cheapest(network)
        if best is None:
            continue
        made = cheapest_values(network, largest_table=6, largest_effort=30_000)  # three eliminations of all
        assert made is not None, seed
        assert made.bound <= best <= made.cost, seed
        values = tuple(made.values.get(v, 0) for v in range(len(network.sizes)))
        assert cost_of(network, values) == made.cost, seed
        gaps += made.bound < made.cost
    assert gaps > 3, "some searches were cut short"


def test_values_that_may_be_possible_are_not_called_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of three that must all differ, of two values each: no pair of tables says that it is impossible."""
    differ = np.zeros((3, 2, 2), np.int64)
    differ[0] = IMPOSSIBLE * np.eye(2, dtype=np.int64)
    ring = CostNetwork([2, 2, 2], [Factor(pair, differ) for pair in ((0, 1), (1, 2), (0, 2))])
    assert cheapest_values(ring, largest_table=4) is None
    monkeypatch.setattr(elimination, "_LONGER", 0)
    with pytest.raises(InputError, match="no plan was found"):
        cheapest_values(ring, largest_table=4, largest_effort=1)


def test_layers_that_repeat_are_computed_once() -> None:
    """A chain of equal tables: the longer one takes no more entries than the shorter."""
    table = np.random.default_rng(0).integers(0, 9, (3, 4, 4))

    def effort(length: int) -> int:
        chain = CostNetwork([4] * (length + 1), [Factor((i, i + 1), table) for i in range(length)])
        tables = elimination._Tables(1 << 20, 1 << 20)
        elimination._Elimination(chain, tables, {})
        return tables.effort - elimination._OVERHEAD * (length + 1)

    assert effort(40) == effort(20)
