"""Capture a model with its loss, plan its shards, rewrite its graph and verify it.

What a model does to the tensors that it saves for backward, which its graph does not do.

Whether the shards together are the model: each compares all of it, tensor by tensor, by name.

From a model as it is to what one shard of it runs: captured with its loss, planned, rewritten, checked.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.fx import Node

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError, PacelineError
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.capture.input_spec import resized
from paceline.replica.capture.verify import check
from paceline.replica.module_utils import preserve_state, tensors_of
from paceline.replica.tensor import rules, sharding_plan
from paceline.replica.tensor.base import OpCall
from paceline.replica.tensor.branches import OpTimes, multiplication_counts
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.op_times import measure_op_times
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Placement
from paceline.replica.tensor.placements import Shard as Split
from paceline.replica.tensor.redistribute import gather_parts
from paceline.replica.tensor.rewrite import ShardGraph, add_unused_tensors, rewrite_for_shard
from paceline.replica.tensor.sharding_plan import NO_RULES, ShardingPlan, plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules

__all__ = ["PreparedShard", "plan_program", "prepare_shard", "rules"]


class WithLoss(nn.Module):
    """(input, target) -> the loss of that batch; its tensors have the names that they have in the model.

    Args:
        program: says the loss.
        model: whose tensors and children it has; itself it is no child, or names would begin with one more word.
    """

    def __new__(cls, program: Program, model: nn.Module) -> Self:
        """Of a class of its own, for messages to name the model's."""
        del program
        return super().__new__(type(type(model).__name__, (cls,), {"__module__": cls.__module__}))

    def __init__(self, program: Program, model: nn.Module) -> None:
        super().__init__()
        self._model, self._loss = (model,), program.loss
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training

    def forward(self, inputs: Tree, target: Tree) -> Tensor:
        """One number."""
        (model,) = self._model
        return self._loss(call(model, inputs), target)

    def train(self, mode: bool = True) -> "WithLoss":
        """Also the model itself, which may look at its own mode."""
        super().train(mode)
        self._model[0].training = mode
        return self


def refuse_saved_hooks(module: nn.Module, inputs: Any, name: str) -> None:
    """Raise InputError where forward has hooks on what it saves, as checkpoint() has to compute it again.

    Args:
        module: in training mode for as long as this takes; left as it is.
        inputs: a batch, as the module is called with it.
        name: of the model.
    """
    with preserve_state(module), _counted() as entered:
        try:
            call(module, resized(inputs, 2))
        except Exception:
            return  # those who capture it try other sizes, and say why none will do
    if entered:
        raise InputError(
            f"{name} calls torch.utils.checkpoint.checkpoint(), or has other hooks on what it saves for backward: a "
            "graph of its operators has none of them, so shards would keep it all; leave checkpoint() out, or write "
            "shards=1"
        )


_ONE_AT_A_TIME = threading.Lock()
"""Of threads that put something in torch's place."""


@contextmanager
def _counted() -> Iterator[list[Any]]:
    """Those of torch's hooks on saved tensors that are entered meanwhile; checkpoint() without reentry is one."""
    entered = list[Any]()
    with _ONE_AT_A_TIME:
        enter = saved_tensors_hooks.__enter__

        def noted(self: Any) -> None:
            entered.append(self)
            enter(self)

        saved_tensors_hooks.__enter__ = noted  # type: ignore[method-assign]
        try:
            yield entered
        finally:
            saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


ULPS = 2.0**12
"""Shards add up in another order: a sum over n terms then differs by about √n units in the last place, and what follows
carries that on, layer by layer. A wrong cut differs by the size of the tensor itself, 2^23 units in float32."""

HALF = 2.0**-3
"""Of a tensor's largest element, in half precision or under autocast: a unit in the last place is 2^-7 of it in bf16,
and so much must not be asked for that a wrong cut would pass."""


class Formed(Protocol):
    """What knows the leaves of a model's inputs and outputs, as ``capture.Captured`` does."""

    def flatten(self, inputs: Tree) -> Sequence[Any]:
        """Those of an input."""

    def rebuild(self, leaves: Sequence[Any]) -> Tree:
        """The output of these."""


def check_shard(
    shard: ShardGraph,
    captured: Formed,
    module: nn.Module,
    inputs: Tree,
    shards: TPCollectives,
    *,
    samples: Sequence[int] = (2, 3),
    of_inputs: Collection[int] = (),
    training: bool = True,
) -> None:
    """Compare with the model: outputs, gradients and buffers. All shards call it together, and all come to one end.

    Args:
        shard: of ``captured``.
        captured: of ``module``.
        module: the model.
        inputs: a batch, as the model is called with it.
        shards: who run it together.
        samples: sizes of the batches that are looked at; none: the batch as it is.
        of_inputs: of which leaves of the input gradients are looked at; they are whole on every shard.
        training: the mode of the model in which ``captured`` was captured.

    Raises:
        InputError: names the first thing that differs.
    """
    stage = _Stage(shard, captured, module, shards)
    what = f"division into {shards.count} shards"
    ulps = _ulps(module)
    own: dict[str, Any] = {"samples": samples, "ulps": ulps, "of_inputs": of_inputs, "training": training}
    check(module, stage.run, stage.named, inputs, what=what, **own)


def _ulps(module: nn.Module) -> float:
    """See :data:`ULPS` and :data:`HALF`."""
    tensors = tensors_of(module).values()
    units = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    if any(torch.is_autocast_enabled(kind) for kind in {t.device.type for t in tensors}):
        return HALF / max(units)
    return min(ULPS, HALF / max(units))


class _Stage:
    """The shards' tensors as whole ones, from which each takes its part."""

    def __init__(self, shard: ShardGraph, captured: Formed, module: nn.Module, shards: TPCollectives) -> None:
        self._shard, self._captured, self._shards = shard, captured, shards
        self._model = tensors_of(module)
        self._parameters = {
            name: tensor.detach().requires_grad_(tensor.requires_grad)
            for name, tensor in self._model.items()
            if isinstance(tensor, nn.Parameter)
        }
        self._local = self._model.keys() - self._parameters.keys()
        self._after: dict[str, Tensor] = {}

    def named(self) -> Mapping[str, Tensor]:
        return self._parameters | self._after

    def run(self, given: Tree) -> Tree:
        names, own = list(self._parameters), tensors_of(self._shard.module)
        layouts = [self._layout(name) for name in names]
        parts = _Enter.apply(self._shards, layouts, *self._parameters.values())  # type: ignore[no-untyped-call]
        tensors = {name: part for name, part in zip(names, parts, strict=True) if name in own}
        buffers = {name: self._part(name, self._model[name]) for name in own if name in self._local}
        leaves = functional_call(self._shard.module, tensors | buffers, tuple(self._captured.flatten(given)))
        owned = {name for name in self._local if isinstance(self._layout(name), OnRank)}
        after = {name: buffers.get(name, self._model[name]) for name in self._model if name in buffers or name in owned}
        self._after = {name: self._whole(name, buffer) for name, buffer in after.items()}
        return self._captured.rebuild(leaves)

    def _layout(self, name: str) -> Placement | None:
        return self._shard.parameters.get(name)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        layout = self._layout(name)
        return (layout.take(tensor, self._shards.rank) if isinstance(layout, Split) else tensor).detach().clone()

    def _whole(self, name: str, part: Tensor) -> Tensor:
        layout = self._layout(name)
        if isinstance(layout, OnRank):
            return self._shards.broadcast(part, layout.shard, name)
        return gather_parts(part, layout, self._shards, name) if isinstance(layout, Split) else part


class _Enter(torch.autograd.Function):
    """Whole parameters -> those of one shard; in backward the whole gradients, of all shards, on each of them."""

    @staticmethod
    def forward(ctx: Any, shards: TPCollectives, layouts: list[Placement | None], *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.layouts, ctx.shapes = shards, layouts, [tensor.shape for tensor in whole]
        ctx.set_materialize_grads(False)
        made = []
        for layout, tensor in zip(layouts, whole, strict=True):
            part = layout.take(tensor, shards.rank) if isinstance(layout, Split) else tensor
            made.append(part.clone())
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        shards, found, spill = ctx.shards, list[Tensor | None](), SpillAllocator()
        for layout, shape, gradient in zip(ctx.layouts, ctx.shapes, gradients, strict=True):
            if isinstance(layout, Split):
                local = layout.local_shape(shape, shards.rank)
                part = gradient if gradient is not None else _zeros(local, gradients)
                found.append(spill.kept(gather_parts(part, layout, shards, "a gradient")))
            elif isinstance(layout, OnRank) or layout == PARTIAL_GRAD:
                term = gradient if gradient is not None else _zeros(shape, gradients)
                found.append(spill.kept(shards.all_reduce(term.contiguous(), "a gradient")))
            else:
                found.append(gradient)
        return None, None, *found


def _zeros(shape: Any, others: tuple[Tensor | None, ...]) -> Tensor:
    alike = next(t for t in others if t is not None)
    return alike.new_zeros(shape)


@dataclass(frozen=True)
class PreparedShard:
    """One shard of a model."""

    captured: Captured
    """The model with its loss: (input, target) -> loss."""
    plan: ShardingPlan
    shard: ShardGraph


GatherText: TypeAlias = Callable[[str, str], Sequence[str]]
"""(what this shard says, what about) -> what each shard says; all of them call it together."""


def gather_alone(said: str, about: str) -> Sequence[str]:
    """Where there is nobody else."""
    del about
    return [said]


def plan_program(
    program: Program,
    module: nn.Module,
    batch: Batch,
    count: int,
    rules: ShardRules = NO_RULES,
    says: GatherText = gather_alone,
    *,
    counts: bool = False,
) -> tuple[Captured, ShardingPlan]:
    """How a model is divided among so many shards, keeping to a strategy's rules.

    What shards have measured differs; they go by the first one's. Where ``counts``, nobody measures: branches are
    balanced by multiplications, the same each time.

    Raises:
        InputError: it can't be captured, or nothing of it can be divided, or not as the rules say.
    """
    together, given = WithLoss(program, module), (batch.input, batch.target)
    refuse_saved_hooks(together, given, type(module).__name__)
    captured = capture(together, given, operators=True, of_inputs=False)
    leaves = captured.flatten(given)
    times = multiplication_counts if counts else agreed_op_times(captured, leaves, says)
    return captured, plan_captured(captured, leaves, count, rules, times, type(module).__name__)


def plan_captured(
    captured: Captured, leaves: Sequence[Any], count: int, rules: ShardRules, times: OpTimes, name: str
) -> ShardingPlan:
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
    functionalize(captured.module)
    made = plan_sharding(operator_graph(captured, count, leaves), count, rules, times)
    if not _divides(made):
        raise InputError(
            f"shards={count}: nothing of {name} can be divided into {count}; write fewer shards, or {WAYS_OUT}"
        )
    return made


def agreed_op_times(captured: Captured, leaves: Sequence[Any], says: GatherText) -> OpTimes:
    """How long operators of a graph take, as the first of those who plan it has measured it."""

    def times(calls: Sequence[OpCall]) -> Mapping[Node, float]:
        took = measure_op_times(captured.module, leaves, calls)
        agreed = says(json.dumps([took[call.node] for call in calls]), "how long operators take")
        return dict(zip((call.node for call in calls), json.loads(agreed[0]), strict=True))

    return times


def _divides(plan: ShardingPlan) -> bool:
    """Whether shards have parts of the parameters, or of what these are applied to."""
    parts = any(isinstance(layout, (Split, OnRank)) for layout in plan.parameters.values())
    return parts or any(step.strategy.share < 1 and sharding_plan.operator_parameters(step.call) for step in plan.steps)


def prepare_shard(
    program: Program,
    module: nn.Module,
    batch: Batch,
    shards: TPCollectives,
    says: GatherText,
    rules: ShardRules = NO_RULES,
) -> PreparedShard:
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
        captured, made = plan_program(program, module, batch, shards.count, rules, says)
        check_same_plan(made, says)
        shard = rewrite_for_shard(made, shards)
        add_unused_tensors(shard, module)
        check_shard(shard, captured, WithLoss(program, module), (batch.input, batch.target), shards)
    return PreparedShard(captured, made, shard)


def check_same_plan(made: ShardingPlan, says: GatherText) -> None:
    """All who plan must have planned the same; raises PacelineError."""
    mine = repr([(step.call.node.name, step.strategy.inputs, step.strategy.outputs) for step in made.steps])
    if any(other != mine for other in says(mine, "how the model is divided")):
        raise PacelineError(
            "the shards have planned different divisions of the model; model() must make the same one everywhere"
        )
