"""Search of the cheapest plan through a graph: the strategies whose cost, with all that they redistribute, is least.

The cost is a sum of tables over a few choices each (:mod:`.cost_network`), of which the cheapest is found by variable
elimination (:mod:`.elimination`); here the strategies become the steps of a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.replica.tensor import redistribute
from paceline.replica.tensor.base import OpCall, OpStrategy
from paceline.replica.tensor.cost_network import OpChoice, cost_network, cost_numbers, plan_cost
from paceline.replica.tensor.elimination import LARGEST_EFFORT, LARGEST_TABLE, cheapest_values
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import REPLICATE
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey


@dataclass(frozen=True)
class SearchStep:
    """The choice for one operator."""

    call: OpCall
    strategy: OpStrategy
    redistributions: tuple[redistribute.Redistribution, ...]
    """(tensor, from, to) of the inputs that are redistributed for it, and were not before."""


@dataclass(frozen=True)
class SearchResult:
    """The cheapest steps that were found; costs are in k-ths of a byte."""

    steps: tuple[SearchStep, ...]
    cost: PlanCost
    bound: PlanCost | None
    """No plan costs less than this; None: these steps are known to be the cheapest."""


def cheapest_steps(
    graph: OperatorGraph,
    choices: Sequence[OpChoice],
    shards: int,
    largest_table: int = LARGEST_TABLE,
    largest_effort: int = LARGEST_EFFORT,
) -> SearchResult | None:
    """Return the cheapest steps, as far as the effort goes; None: no choices fit together.

    Args:
        graph: operators of the captured graph.
        choices: strategies of each of them, in order.
        shards: k.
        largest_table: see :func:`~paceline.replica.tensor.elimination.cheapest_values`.
        largest_effort: likewise.
    """
    if not all(choice.every for choice in choices):
        return None
    found = cheapest_values(cost_network(graph, choices, shards), largest_table, largest_effort)
    if found is None:
        return None
    strategies = [choice.every[found.values.get(i, 0)] for i, choice in enumerate(choices)]
    steps, cost = follow(graph, [choice.call for choice in choices], strategies, shards)
    assert cost_numbers(cost)[:2] == found.cost[:2], "steps cost what the tables say"
    return SearchResult(steps, cost, None if found.bound == found.cost else plan_cost(found.bound))


def follow(
    graph: OperatorGraph, calls: Sequence[OpCall], strategies: Sequence[OpStrategy], shards: int
) -> tuple[tuple[SearchStep, ...], PlanCost]:
    """Return the steps by which operators have these strategies, and their cost, in k-ths of a byte."""
    steps, cost, present = list[SearchStep](), PlanCost(), dict[ValueKey, Placements]()
    for call, strategy in zip(calls, strategies, strict=True):
        taken = redistribute.input_cost(call, strategy, present)
        assert taken is not None, "impossible strategies cost too much to be chosen"
        added, redistributions, after = taken
        present |= after
        present |= {v.key: frozenset((p,)) for v, p in zip(call.outputs, strategy.outputs, strict=True)}
        sent = round(strategy.sent_bytes * call.shards)
        cost += added + PlanCost(0, sent, strategy.collectives, op_work(call) * strategy.share)
        steps.append(SearchStep(call, strategy, redistributions))
    for value in graph.outputs():  # the model returns them whole
        sources = present.get(value.key, frozenset((REPLICATE,)))
        if REPLICATE not in sources and value.parameter is None:
            cheapest = redistribute.cheapest_redistribution(value, sources, REPLICATE, shards)
            assert cheapest is not None, "likewise"
            cost += cheapest[1]
    return tuple(steps), cost
