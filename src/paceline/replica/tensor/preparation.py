"""From a model as it is to what one shard of it runs: captured with its loss, planned, rewritten, checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.fx import Node

from paceline.core.errors import InputError, PacelineError
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture import Captured, capture
from paceline.replica.refusal import WAYS_OUT
from paceline.replica.tensor import possible, rules
from paceline.replica.tensor.base import Call
from paceline.replica.tensor.branches import Times, counted
from paceline.replica.tensor.calls import operators
from paceline.replica.tensor.forgotten import refuse_saved_hooks
from paceline.replica.tensor.layouts import Owned, Split
from paceline.replica.tensor.out_of_place import write_out_of_place
from paceline.replica.tensor.plan import NO_RULES, Plan, plan
from paceline.replica.tensor.rehearsal import check_shard
from paceline.replica.tensor.rewrite import Shard, keep_unused, rewritten
from paceline.replica.tensor.shards import Shards
from paceline.replica.tensor.times import measured
from paceline.replica.tensor.with_loss import WithLoss
from paceline.shard_rules import ShardRules

__all__ = ["Prepared", "planned", "prepared", "rules"]


@dataclass(frozen=True)
class Prepared:
    """One shard of a model."""

    captured: Captured
    """The model with its loss: (input, target) -> loss."""
    plan: Plan
    shard: Shard


Says: TypeAlias = Callable[[str, str], Sequence[str]]
"""(what this shard says, what about) -> what each shard says; all of them call it together."""


def to_itself(said: str, about: str) -> Sequence[str]:
    """Where there is nobody else."""
    del about
    return [said]


def planned(
    program: Program,
    module: nn.Module,
    batch: Batch,
    count: int,
    rules: ShardRules = NO_RULES,
    says: Says = to_itself,
    *,
    counts: bool = False,
) -> tuple[Captured, Plan]:
    """How a model is divided among so many shards, keeping to a strategy's rules.

    What shards have measured differs; they go by the first one's. Where ``counts``, nobody measures: branches are
    balanced by multiplications, the same each time.

    Raises:
        InputError: it can't be captured, or nothing of it can be divided, or not as the rules say.
    """
    together, given = WithLoss(program, module), (batch.input, batch.target)
    refuse_saved_hooks(together, given, type(module).__name__)
    captured = capture(together, given, operators=True, of_inputs=False)
    leaves = captured.flat(given)
    times = counted if counts else agreed_times(captured, leaves, says)
    return captured, planned_graph(captured, leaves, count, rules, times, type(module).__name__)


def planned_graph(
    captured: Captured, leaves: Sequence[Any], count: int, rules: ShardRules, times: Times, name: str
) -> Plan:
    """How a captured model is divided; its operators that write in place are replaced where that is the same.

    Args:
        captured: the model's graph of operators.
        leaves: of the input that is planned for.
        count: of shards.
        rules: of the strategy, which the plan keeps to.
        times: how long operators take.
        name: the model's.

    Raises:
        InputError: nothing of it can be divided, or not as the rules say.
    """
    write_out_of_place(captured.module)
    made = plan(operators(captured, count, leaves), count, rules, times)
    if not _divides(made):
        raise InputError(
            f"shards={count}: nothing of {name} can be divided into {count}; write fewer shards, or {WAYS_OUT}"
        )
    return made


def agreed_times(captured: Captured, leaves: Sequence[Any], says: Says) -> Times:
    """How long operators of a graph take, as the first of those who plan it has measured it."""

    def times(calls: Sequence[Call]) -> Mapping[Node, float]:
        took = measured(captured.module, leaves, calls)
        agreed = says(json.dumps([took[call.node] for call in calls]), "how long operators take")
        return dict(zip((call.node for call in calls), json.loads(agreed[0]), strict=True))

    return times


def _divides(plan: Plan) -> bool:
    """Whether shards have parts of the parameters, or of what these are applied to."""
    parts = any(isinstance(layout, (Split, Owned)) for layout in plan.parameters.values())
    return parts or any(step.way.share < 1 and possible.parameters(step.call) for step in plan.steps)


def prepared(
    program: Program,
    module: nn.Module,
    batch: Batch,
    shards: Shards,
    says: Says,
    rules: ShardRules = NO_RULES,
) -> Prepared:
    """What one shard runs; all shards call it together.

    Args:
        program: whose model it is.
        module: with the values of A_0.
        batch: the first one.
        shards: who run it together.
        says: asks all of them.
        rules: of the strategy, which the plan keeps to.

    Raises:
        InputError: as :func:`planned` says, or where the shards together are not the model.
        PacelineError: the shards have planned differently.
    """
    device = next(module.parameters()).device
    with program.autocast(str(device)):
        captured, made = planned(program, module, batch, shards.count, rules, says)
        agree(made, says)
        shard = rewritten(made, shards)
        keep_unused(shard, module)
        check_shard(shard, captured, WithLoss(program, module), (batch.input, batch.target), shards)
    return Prepared(captured, made, shard)


def agree(made: Plan, says: Says) -> None:
    """All who plan must have planned the same; raises PacelineError."""
    mine = repr([(step.call.node.name, step.way.takes, step.way.gives) for step in made.steps])
    if any(other != mine for other in says(mine, "how the model is divided")):
        raise PacelineError(
            "the shards have planned different divisions of the model; model() must make the same one everywhere"
        )
