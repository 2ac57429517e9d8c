"""Pipelines whose stages are sharded: each part of a cut model is planned and rewritten as a whole model is.

Values received from other parts, and those sent to them, are replicated on every shard, and so are their gradients; so
a shard communicates with one shard of each other stage and needs no more of them.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError, unknown
from paceline.program import Program
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.module_utils import TensorPart, preserve_tensors
from paceline.replica.pipeline.cut import Cut, Part
from paceline.replica.pipeline.prepare import run_parts
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.op_times import multiplication_counts
from paceline.replica.tensor.placements import OnRank, Placement, Shard
from paceline.replica.tensor.prepare import GatherText, agreed_op_times, check_same_plan, gather_alone
from paceline.replica.tensor.rewrite import add_unused_tensors, rewrite_for_shard
from paceline.replica.tensor.shard_check import check_shard
from paceline.replica.tensor.sharding_plan import ShardingPlan, plan_sharding
from paceline.replica.tensor.sharding_report import ShardingReport
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules


@dataclass(frozen=True)
class StageTable:
    """A part of the model with the report of its sharding.

    Args:
        sharding: None: it is not sharded.
    """

    stage: int
    part: int
    parameters: int
    sharding: ShardingReport | None

    def __str__(self) -> str:
        if self.sharding is None:
            return f"whole, with {self.parameters:,} parameters"
        return str(self.sharding)

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        divided = {} if self.sharding is None else self.sharding.to_json()
        return {"stage": self.stage, "part": self.part, "shards": 1, "parameters": self.parameters} | divided


@dataclass(frozen=True)
class StagedSharding:
    """The tables of all parts of a model."""

    stages: Sequence[StageTable]

    def __str__(self) -> str:
        """Return the tables, one below the other."""
        several = len({each.stage for each in self.stages}) < len(self.stages)
        names = (f"stage {each.stage}{f', part {each.part}' if several else ''}" for each in self.stages)
        return "\n\n".join(f"{name}: {each}" for name, each in zip(names, self.stages, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {"stages": [each.to_json() for each in self.stages]}


@dataclass(frozen=True)
class ShardingRequest:
    """A cut model, and the number of shards of each part.

    Args:
        program: gives the precision.
        cut: of the model.
        module: the model, with the values of A_0.
        leaves: of its input, for a micro-batch.
        counts: of shards, by part.
        rules: of the strategy.
    """

    program: Program
    cut: Cut
    module: nn.Module
    leaves: Sequence[Tensor]
    counts: Sequence[int]
    rules: ShardRules


@dataclass(frozen=True)
class ShardedParts:
    """All parts of a model, sharded.

    Args:
        parts: this worker's are rewritten as its shards; the others are as they were cut.
        placements: for each part, the placements of its tensors.
    """

    parts: tuple[Part, ...]
    placements: tuple[Mapping[str, Placement], ...]


def shard_parts(
    request: ShardingRequest, own: Mapping[int, TPCollectives], gather: GatherText, *, checked: bool = True
) -> ShardedParts:
    """Shard the parts of a model; all workers of all replicas call this together, and come to the same plans.

    Args:
        request: the same on all of them.
        own: this worker's parts, each with the group of its shards.
        gather: from all of them.
        checked: whether the shards of each part are compared with it.

    Raises:
        InputError: nothing of a part can be sharded so, or a part's shards together differ from the part.
    """
    parts: list[Part] = []
    placements: list[Mapping[str, Placement]] = []
    with request.program.autocast(str(next(request.module.parameters()).device)):
        planner = _PartPlanner(request, gather, measured=True)
        for part in request.cut.parts:
            plan, shards = planner.plan(part), own.get(part.number)
            if plan is not None and shards is not None:
                shard = rewrite_for_shard(plan, shards)
                add_unused_tensors(shard, part.module)
                if checked:
                    arguments = planner.arguments[part.number]
                    whole, inputs = TensorPart(part.module, arguments), [a for a in arguments if isinstance(a, Tensor)]
                    # Leaves of the model's input come first; gradients go back by the received values after them.
                    received = range(len(part.inputs), len(inputs))
                    check_shard(shard, whole, whole, tuple(inputs), shards, samples=(), of_inputs=received)
                part = replace(part, module=shard.module)
            parts.append(part)
            placements.append({} if plan is None else plan.parameters)
    return ShardedParts(tuple(parts), tuple(placements))


def plan_parts(request: ShardingRequest) -> list[ShardingPlan | None]:
    """Return the plan of each part; None for a part that is not sharded.

    Nothing is measured: branches are balanced by multiplications, the same each time.

    Raises:
        InputError: as :func:`shard_parts`.
    """
    with request.program.autocast(str(next(request.module.parameters()).device)):
        planner = _PartPlanner(request, gather_alone, measured=False)
        return [planner.plan(part) for part in request.cut.parts]


class _PartPlanner:
    """Plans part after part; a tied weight is placed as in the first part that holds it."""

    def __init__(self, request: ShardingRequest, gather: GatherText, *, measured: bool) -> None:
        self._request, self._gather, self._measured = request, gather, measured
        self._tied: dict[str, Placement] = {}
        with preserve_tensors(request.module), torch.no_grad():
            self.arguments = [run.arguments for run in run_parts(request.cut, request.leaves)]
            """Arguments of each part for a micro-batch."""
        modules = {module for part in request.cut.parts for module in _modules(part)}
        for pattern in request.rules:
            if not fnmatch.filter(modules, pattern):
                raise unknown("module in shard_rules", pattern, modules)

    def plan(self, part: Part) -> ShardingPlan | None:
        """Return the plan of a part, the same on all workers; None: it is not sharded."""
        request, cut, arguments = self._request, self._request.cut, self.arguments[part.number]
        count = request.counts[part.number]
        tied = [name for name, numbers in cut.tied.items() if part.number in numbers]
        for name in tied:
            counts = sorted({request.counts[number] for number in cut.tied[name]})
            if len(counts) > 1:
                raise InputError(
                    f"{name} is shared by stages of {counts[0]} and of {counts[-1]} shards; write the same number of "
                    "shards for them"
                )
        if count == 1:
            return None
        functionalize(part.module)  # in place: shards and the part that they are compared with are the same graph
        captured: Captured = replace(cut.captured, module=part.module)
        # Gradients go back to other parts through the placeholders of received values.
        received = set(part.module.graph.find_nodes(op="placeholder")[len(part.inputs) :])
        operators = operator_graph(captured, count, arguments, flowing=received)
        rules = ShardRules({name: rule for name, rule in request.rules.items() if fnmatch.filter(_modules(part), name)})
        times = agreed_op_times(captured, arguments, self._gather) if self._measured else multiplication_counts
        plan = plan_sharding(operators, count, rules, times, self._tied)
        check_same_plan(plan, self._gather)
        # Later parts that hold the weight have to place it in the same way: its gradients are summed shard by shard.
        self._tied |= {name: plan.parameters[name] for name in tied if name in plan.parameters}
        if not any(isinstance(placement, (Shard, OnRank)) for placement in plan.parameters.values()):
            raise InputError(
                f"shards={count}: nothing of stage {part.number} can be divided into {count}; write fewer stages or "
                f"shards, cuts= elsewhere, or {WAYS_OUT}"
            )
        return plan


def _modules(part: Part) -> set[str]:
    """Return the names of modules that hold parameters."""
    return {name.rpartition(".")[0] for name, _ in part.module.named_parameters()}
