"""Prepare a model for tensor parallelism: capture it with its loss, plan its shards, rewrite its graph and check it."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from paceline.core.errors import InputError, PacelineError
from paceline.program import Program, call
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.capture.handover import Obtain, capture_here
from paceline.replica.capture.input_spec import resized
from paceline.replica.capture.looks import other_inputs
from paceline.replica.module_utils import WithLoss, preserve_state
from paceline.replica.tensor import rules as _rules
from paceline.replica.tensor.base import OpCall
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.op_times import OpTimes, measure_op_times, multiplication_counts
from paceline.replica.tensor.rewrite import ShardGraph, add_unused_tensors, rewrite_for_shard
from paceline.replica.tensor.shard_check import check_shard
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan, plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules

assert _rules, "importing them registers them"

# (this shard's text, its description) -> each shard's text; all shards call it together.
GatherText: TypeAlias = Callable[[str, str], Sequence[str]]


@dataclass(frozen=True)
class PreparedShard:
    """One shard of a model."""

    program: Program
    shards: TPCollectives
    """The group of all shards."""
    captured: Captured
    """The model with its loss: (input, target) -> loss."""
    plan: ShardingPlan
    shard: ShardGraph
    """Returns the loss, or its own term of it: backward needs no other's, so no shard waits for others before it."""

    def loss(self, returned: Tensor) -> Tensor:
        """Return the loss, of what the shard has returned; all shards call it together."""
        total = self.shard.total
        return returned if total is None else self.shards.all_reduce(returned.detach(), total.name)


def prepare_shard(
    program: Program,
    module: nn.Module,
    batch: Batch,
    shards: TPCollectives,
    gather: GatherText,
    rules: ShardRules = NO_RULES,
    *,
    check: bool = True,
    obtain: Obtain = capture_here,
) -> PreparedShard:
    """Prepare one shard of a model; all shards call it together.

    Args:
        program: program of the model.
        module: the model, with the values of A_0.
        batch: the first batch.
        shards: the group.
        gather: gathers a text of each shard.
        rules: rules of the strategy, which the plan keeps.
        check: compare the shards with the model; False: they can't communicate.
        obtain: captures the model, or takes another worker's capture of it.

    Raises:
        InputError: see :func:`plan_program`; or the shards together do not compute what the model does.
        PacelineError: the shards have planned differently.
    """
    device = next(module.parameters()).device
    with program.autocast(str(device)):
        captured, plan = plan_program(program, module, batch, shards.count, rules, gather, obtain)
        check_same_plan(plan, gather)
        shard = rewrite_for_shard(plan, shards)
        add_unused_tensors(shard, module)
        if check:
            check_shard(shard, captured, WithLoss(program, module), (batch.input, batch.target), shards)
        if shard.total is not None:
            shard.total.put_off = True
    return PreparedShard(program, shards, captured, plan, shard)


def gather_alone(text: str, description: str) -> Sequence[str]:
    """Gather the text of a process without peers."""
    del description
    return [text]


def plan_program(
    program: Program,
    module: nn.Module,
    batch: Batch,
    count: int,
    rules: ShardRules = NO_RULES,
    gather: GatherText = gather_alone,
    obtain: Obtain = capture_here,
    *,
    counts: bool = False,
) -> tuple[Captured, ShardingPlan]:
    """Plan a model for ``count`` shards, keeping a strategy's rules.

    Measured times differ from shard to shard; all use those of the first. With ``counts`` nothing is measured: branches
    are balanced by multiplications, the same each time.

    Raises:
        InputError: the model can't be captured, or nothing of it can be sharded, or not as the rules say.
    """
    captured = obtain(lambda: capture_with_loss(program, module, batch), module)
    leaves = captured.flatten((batch.input, batch.target))
    times = multiplication_counts if counts else agreed_op_times(captured, leaves, gather)
    return captured, plan_captured(captured, leaves, count, rules, times, type(module).__name__)


def capture_with_loss(program: Program, module: nn.Module, batch: Batch) -> Captured:
    """Capture a model with its loss, operator by operator; args and raises as :func:`plan_program`."""
    with_loss, inputs = WithLoss(program, module), (batch.input, batch.target)
    _refuse_saved_hooks(with_loss, inputs, type(module).__name__)
    others = other_inputs(program, batch.samples, with_target=True)
    return capture(with_loss, inputs, operators=True, of_inputs=False, others=others)


def plan_captured(
    captured: Captured, leaves: Sequence[Any], count: int, rules: ShardRules, times: OpTimes, name: str
) -> ShardingPlan:
    """Plan a captured model; its operators that write in place are replaced where that is the same.

    Args:
        captured: the model's graph of operators.
        leaves: leaves of the input that is planned for.
        count: number of shards.
        rules: rules of the strategy, which the plan keeps.
        times: times of operators.
        name: name of the model.

    Raises:
        InputError: nothing of it can be sharded, or not as the rules say.
    """
    functionalize(captured.module)
    plan = plan_sharding(operator_graph(captured, count, leaves), count, rules, times)
    if not plan.shards_anything:
        raise InputError(
            f"shards={count}: nothing of {name} can be divided into {count}; write fewer shards, or {WAYS_OUT}"
        )
    return plan


def agreed_op_times(captured: Captured, leaves: Sequence[Any], gather: GatherText) -> OpTimes:
    """Return what measures operators of a graph; all shards get the times of the first."""

    def times(calls: Sequence[OpCall]) -> Mapping[Node, float]:
        seconds = measure_op_times(captured.module, leaves, calls)
        gathered = gather(json.dumps([seconds[call.node] for call in calls]), "how long operators take")
        return dict(zip((call.node for call in calls), json.loads(gathered[0]), strict=True))

    return times


def check_same_plan(plan: ShardingPlan, gather: GatherText) -> None:
    """Raise PacelineError if the shards have planned differently; all of them call it together."""
    local = repr([(step.call.node.name, step.strategy.inputs, step.strategy.outputs) for step in plan.steps])
    if any(remote != local for remote in gather(local, "how the model is divided")):
        raise PacelineError(
            "the shards have planned different divisions of the model; model() must make the same one everywhere"
        )


# Held by a thread while it patches torch.
PATCHING = threading.Lock()


def _refuse_saved_hooks(module: nn.Module, inputs: Any, name: str) -> None:
    """Raise InputError if forward has hooks on what it saves, as checkpoint() has to recompute it.

    Args:
        module: in training mode during the call; left as it is.
        inputs: a batch, as the module is called with it.
        name: name of the model.
    """
    entered = list[Any]()
    with preserve_state(module), PATCHING:
        enter = saved_tensors_hooks.__enter__

        def record(self: Any) -> None:
            entered.append(self)
            enter(self)

        saved_tensors_hooks.__enter__ = record  # type: ignore[method-assign]  # checkpoint() without reentry enters it
        try:
            call(module, resized(inputs, 2))
        except Exception:
            return  # capture tries other sizes, and says why none will do
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    if entered:
        raise InputError(
            f"{name} calls torch.utils.checkpoint.checkpoint(), or has other hooks on what it saves for backward: a "
            "graph of its operators has none of them, so shards would keep it all; leave checkpoint() out, or write "
            "shards=1"
        )
