"""The slow search of a plan: operator by operator, with every state of the tensors that are still needed.

It leaves nothing out, so that it can say what the least cost is.
"""

from collections.abc import Sequence
from typing import TypeAlias

from paceline.replica.tensor.base import OpCall, OpStrategy
from paceline.replica.tensor.branches import place_branches
from paceline.replica.tensor.cost_network import OpChoice
from paceline.replica.tensor.graph_ops import OperatorGraph
from paceline.replica.tensor.op_times import op_work
from paceline.replica.tensor.placements import REPLICATE
from paceline.replica.tensor.redistribute import Placements, PlanCost, ValueKey, cheapest_redistribution, input_cost
from paceline.replica.tensor.sharding_plan import NO_RULES, UserRules, op_choices

# Placements of the tensors that are needed, and (region, True if its branches are on one shard each) once it has begun.
State: TypeAlias = tuple[frozenset[tuple[ValueKey, Placements]], frozenset[tuple[int, bool]]]


def choices_of(graph: OperatorGraph, shards: int) -> list[OpChoice]:
    """What is open for each operator without rules."""
    rules = UserRules(NO_RULES, graph.captured.owners, tuple(graph.calls.values()))
    return op_choices(graph, rules, place_branches(graph, shards))


def least_cost(graph: OperatorGraph, choices: Sequence[OpChoice], shards: int) -> PlanCost | None:
    """The cost of the cheapest plan, in k-ths of a byte."""
    outputs = {value.key for value in graph.outputs()}
    costs: dict[State, PlanCost] = {(frozenset(), frozenset()): PlanCost()}
    for i, choice in enumerate(choices):
        needed = outputs | {value.key for later in choices[i + 1 :] for value in later.call.inputs}
        after: dict[State, PlanCost] = {}
        for (state, modes), cost in costs.items():
            present = dict(state)
            for alone in (False, True):
                if alone and choice.region is None:
                    continue
                if choice.region is not None and dict(modes).get(choice.region, alone) is not alone:
                    continue
                begun = modes if choice.region is None else modes | {(choice.region, alone)}
                for strategy in choice.alone if alone else choice.strategies:
                    made = _advanced(choice.call, strategy, present)
                    if made is not None:
                        kept = frozenset((k, p) for k, p in made[1].items() if k in needed)
                        total = cost + made[0]
                        after[kept, begun] = min(total, after.get((kept, begun), total))
        costs = after
    ended = (_ended(graph, dict(state), cost, shards) for (state, _), cost in costs.items())
    return min((cost for cost in ended if cost is not None), default=None)


def _advanced(
    call: OpCall, strategy: OpStrategy, present: dict[ValueKey, Placements]
) -> tuple[PlanCost, dict[ValueKey, Placements]] | None:
    taken = input_cost(call, strategy, present)
    if taken is None:
        return None
    sent = round(strategy.sent_bytes * call.shards)
    cost = taken[0] + PlanCost(0, sent, strategy.collectives, op_work(call) * strategy.share)
    made = {v.key: frozenset((p,)) for v, p in zip(call.outputs, strategy.outputs, strict=True)}
    return cost, {**present, **taken[2], **made}


def _ended(graph: OperatorGraph, present: dict[ValueKey, Placements], cost: PlanCost, shards: int) -> PlanCost | None:
    for value in graph.outputs():
        sources = present.get(value.key, frozenset((REPLICATE,)))
        if REPLICATE not in sources and value.parameter is None:
            made = cheapest_redistribution(value, sources, REPLICATE, shards)
            if made is None:
                return None
            cost += made[1]
    return cost
