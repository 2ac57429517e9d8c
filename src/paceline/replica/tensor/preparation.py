"""From a model as it is to what one shard of it runs: captured with its loss, planned, rewritten, checked."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.core.errors import InputError
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.capture import Captured, capture
from paceline.replica.refusal import WAYS_OUT
from paceline.replica.tensor import rules
from paceline.replica.tensor.calls import operators
from paceline.replica.tensor.forgotten import refuse_saved_hooks
from paceline.replica.tensor.layouts import Owned, Split
from paceline.replica.tensor.plan import NO_RULES, Plan, plan
from paceline.replica.tensor.rehearsal import check_shard
from paceline.replica.tensor.rewrite import Shard, put, rewritten
from paceline.replica.tensor.shards import Shards
from paceline.replica.tensor.with_loss import WithLoss
from paceline.replica.undisturbed import tensors_of
from paceline.shard_rules import ShardRules

__all__ = ["Prepared", "planned", "prepared", "rules"]


@dataclass(frozen=True)
class Prepared:
    """One shard of a model."""

    captured: Captured
    """The model with its loss: (input, target) -> loss."""
    plan: Plan
    shard: Shard


def planned(
    program: Program, module: nn.Module, batch: Batch, count: int, rules: ShardRules = NO_RULES
) -> tuple[Captured, Plan]:
    """How a model is divided among so many shards, keeping to a strategy's rules.

    Raises:
        InputError: it can't be captured, or nothing of it can be divided, or not as the rules say.
    """
    together, given = WithLoss(program, module), (batch.input, batch.target)
    refuse_saved_hooks(together, given, type(module).__name__)
    captured = capture(together, given, operators=True)
    leaves = captured.flat((batch.input, batch.target))
    made = plan(operators(captured, count, leaves), count, rules)
    if not any(isinstance(layout, (Split, Owned)) for layout in made.parameters.values()):
        raise InputError(
            f"shards={count}: nothing of {type(module).__name__} can be divided into {count}; write fewer shards, or "
            f"{WAYS_OUT}"
        )
    return captured, made


def prepared(
    program: Program,
    module: nn.Module,
    batch: Batch,
    shards: Shards,
    agree: Callable[[Plan], None] = lambda _: None,
    rules: ShardRules = NO_RULES,
) -> Prepared:
    """What one shard runs; all shards call it together.

    Args:
        program: whose model it is.
        module: with the values of A_0.
        batch: the first one.
        shards: who run it together.
        agree: is told the plan, and raises where the others have another one.
        rules: of the strategy, which the plan keeps to.
    """
    device = next(module.parameters()).device
    with program.autocast(str(device)):
        captured, made = planned(program, module, batch, shards.count, rules)
        agree(made)
        shard = rewritten(made, shards)
        _add_unused(shard.module, module)
        check_shard(shard, captured, WithLoss(program, module), (batch.input, batch.target), shards)
    return Prepared(captured, made, shard)


def _add_unused(shard: nn.Module, module: nn.Module) -> None:
    """The tensors of a model that its graph does not use are A's as well."""
    used = tensors_of(shard)
    for name, tensor in tensors_of(module).items():
        if name not in used:
            put(shard, name, tensor)
