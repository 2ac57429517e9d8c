"""Stages whose operators are sharded: the parts of a pipeline, each divided among the shards of its stage.

Whether the shards of a part together are the part.

How the parts of a pipeline are divided, one table a part.

The parts of a pipeline, each divided among the shards of its stage.

A part is planned and rewritten as a whole model is. What comes in from other parts, and what goes out to them, is whole
on every shard, and so are its gradients; so a shard talks to one shard of each other stage and needs no more of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.core.errors import InputError, unknown
from paceline.program import Program
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.export import WAYS_OUT
from paceline.replica.module_utils import preserve_tensors
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.prepare import fed
from paceline.replica.tensor.branches import OpTimes, multiplication_counts
from paceline.replica.tensor.functionalize import functionalize
from paceline.replica.tensor.graph_ops import operator_graph
from paceline.replica.tensor.placements import OnRank
from paceline.replica.tensor.placements import Placement as Lies
from paceline.replica.tensor.placements import Shard as Split
from paceline.replica.tensor.prepare import GatherText, agreed_op_times, check_same_plan, check_shard, gather_alone
from paceline.replica.tensor.report import ShardingReport
from paceline.replica.tensor.rewrite import ShardGraph, add_unused_tensors, rewrite_for_shard
from paceline.replica.tensor.sharding_plan import ShardingPlan, plan_sharding
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.shard_rules import ShardRules


def check_part(shard: ShardGraph, part: Part, given: Sequence[Any], shards: TPCollectives) -> None:
    """Compare a part's shards with it: what it gives, gradients and buffers. All of them call it together.

    Args:
        shard: of the part.
        part: as it was cut.
        given: what it is given for a micro-batch.
        shards: who run it together.

    Raises:
        InputError: names the first thing that differs.
    """
    received = range(len(part.inputs), len(given))
    tensors = [index for index, value in enumerate(given) if isinstance(value, Tensor)]
    places = frozenset(place for place, index in enumerate(tensors) if index in received)
    form = _Form(given, tensors)
    check_shard(
        shard, form, _Fed(part.module, form), tuple(given[i] for i in tensors), shards, samples=(), of_inputs=places
    )


@final
class _Form:
    """Inputs are the tensors among what is given; the rest stays as it is."""

    def __init__(self, given: Sequence[Any], tensors: Sequence[int]) -> None:
        self._given, self._tensors = list(given), list(tensors)

    def flatten(self, inputs: Any) -> list[Any]:
        """All that is given."""
        made = list(self._given)
        for index, tensor in zip(self._tensors, inputs, strict=True):
            made[index] = tensor
        return made

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """What is given away, tensors alone."""
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


@final
class _Fed(nn.Module):
    """A part that takes tensors alone; it has the part's own tensors, under the same names."""

    _run: Callable[..., Any]

    def __init__(self, part: torch.fx.GraphModule, form: _Form) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        vars(self)["_run"] = part.forward
        self._form = form

    def forward(self, *tensors: Tensor) -> Any:
        """What the part gives for them."""
        return self._form.rebuild(self._run(*self._form.flatten(tensors)))


@dataclass(frozen=True)
class StageTable:
    """A part of the model, and how it is divided."""

    stage: int
    part: int
    parameters: int
    sharding: ShardingReport | None
    """None: it is whole."""

    def __str__(self) -> str:
        if self.sharding is None:
            return f"whole, with {self.parameters:,} parameters"
        return str(self.sharding)

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        divided = {} if self.sharding is None else self.sharding.to_json()
        return {"stage": self.stage, "part": self.part, "shards": 1, "parameters": self.parameters} | divided


@dataclass(frozen=True)
class StagedSharding:
    """Of all parts of a model."""

    stages: Sequence[StageTable]

    def __str__(self) -> str:
        """The tables, one below the other."""
        several = len({each.stage for each in self.stages}) < len(self.stages)
        names = (f"stage {each.stage}{f', part {each.part}' if several else ''}" for each in self.stages)
        return "\n\n".join(f"{name}: {each}" for name, each in zip(names, self.stages, strict=True))

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        return {"stages": [each.to_json() for each in self.stages]}


@dataclass(frozen=True)
class ShardedParts:
    """Of all parts of a model."""

    parts: tuple[Part, ...]
    """Those that are this shard's are rewritten; the others are as they were cut."""
    lies: tuple[Mapping[str, Lies], ...]
    """Of each part: how its tensors lie among its shards."""


def divided(
    program: Program,
    cut: Cut,
    module: nn.Module,
    leaves: Sequence[Tensor],
    counts: Sequence[int],
    own: Mapping[int, TPCollectives],
    says: GatherText,
    rules: ShardRules,
    *,
    checked: bool = True,
) -> ShardedParts:
    """Divide them; all workers of all replicas call it together, and come to the same plans.

    Args:
        program: says precision.
        cut: of the model.
        module: the model, with the values of A_0.
        leaves: of its input, for a micro-batch.
        counts: of shards, by part.
        own: the parts that this worker has, and with whom it shares each.
        says: asks all of them.
        rules: of the strategy.
        checked: whether the shards of each part are compared with it.

    Raises:
        InputError: nothing of a part can be divided so, or a part's shards together are not the part.
    """
    with program.autocast(str(next(module.parameters()).device)):
        given = _given(cut, module, leaves)
        dividing = _Dividing(
            cut, given, counts, says, rules, lambda whole, leaves: agreed_op_times(whole, leaves, says)
        )
        return dividing.all(own, checked=checked)


def planned(
    program: Program,
    cut: Cut,
    module: nn.Module,
    leaves: Sequence[Tensor],
    counts: Sequence[int],
    rules: ShardRules,
) -> list[ShardingPlan | None]:
    """How each part would be divided; of a part that stays whole None.

    Nobody measures: branches are balanced by multiplications, the same each time. Args and raises: as :func:`divided`.
    """
    with program.autocast(str(next(module.parameters()).device)):
        given = _given(cut, module, leaves)
        return _Dividing(cut, given, counts, gather_alone, rules, lambda *_: multiplication_counts).plans()


def _given(cut: Cut, module: nn.Module, leaves: Sequence[Tensor]) -> list[list[Any]]:
    """What each part is given: leaves of the input, and what earlier parts have made of them."""
    with preserve_tensors(module), torch.no_grad():
        return [each.given for each in fed(cut, leaves)]


class _Dividing:
    def __init__(
        self,
        cut: Cut,
        given: Sequence[Sequence[Any]],
        counts: Sequence[int],
        says: GatherText,
        rules: ShardRules,
        times: Callable[[Captured, Sequence[Any]], OpTimes],
    ) -> None:
        self._cut, self._given, self._counts = cut, given, counts
        self._says, self._rules, self._times = says, rules, times
        self._fixed: dict[str, Lies] = {}

    def all(self, own: Mapping[int, TPCollectives], *, checked: bool) -> ShardedParts:
        self._refuse_unmatched()
        made = [self._divided(part, own.get(part.number), checked=checked) for part in self._cut.parts]
        return ShardedParts(tuple(part for part, _ in made), tuple(lies for _, lies in made))

    def plans(self) -> list[ShardingPlan | None]:
        self._refuse_unmatched()
        return [self._plan(part) for part in self._cut.parts]

    def _divided(self, part: Part, shards: TPCollectives | None, *, checked: bool) -> tuple[Part, Mapping[str, Lies]]:
        plan_of = self._plan(part)
        if plan_of is None:
            return part, {}
        if shards is None:
            return part, plan_of.parameters
        shard = rewrite_for_shard(plan_of, shards)
        add_unused_tensors(shard, part.module)
        if checked:
            check_part(shard, part, self._given[part.number], shards)
        return replace(part, module=shard.module), plan_of.parameters

    def _plan(self, part: Part) -> ShardingPlan | None:
        count = self._counts[part.number]
        tied = [name for name, numbers in self._cut.tied.items() if part.number in numbers]
        self._refuse_ties(tied)
        if count == 1:
            return None
        functionalize(part.module)
        plan_of = self._planned(part, count)
        check_same_plan(plan_of, self._says)
        self._fixed |= {name: plan_of.parameters[name] for name in tied if name in plan_of.parameters}
        if not any(isinstance(layout, (Split, OnRank)) for layout in plan_of.parameters.values()):
            raise InputError(
                f"shards={count}: nothing of stage {part.number} can be divided into {count}; write fewer stages or "
                f"shards, cuts= elsewhere, or {WAYS_OUT}"
            )
        return plan_of

    def _planned(self, part: Part, count: int) -> ShardingPlan:
        captured: Captured = replace(self._cut.captured, module=part.module)
        given = self._given[part.number]
        found = operator_graph(captured, count, given, flowing=_flowing(part))
        rules = ShardRules({pattern: way for pattern, way in self._rules.items() if _matches(pattern, _modules(part))})
        return plan_sharding(found, count, rules, self._times(captured, given), self._fixed)

    def _refuse_unmatched(self) -> None:
        """Raise InputError for a pattern that fits no module of any part."""
        known = {module for part in self._cut.parts for module in _modules(part)}
        for pattern in self._rules:
            if not _matches(pattern, known):
                raise unknown("module in shard_rules", pattern, known)

    def _refuse_ties(self, tied: Sequence[str]) -> None:
        """A weight that stages share lies in the same way on all of them."""
        for name in tied:
            counts = sorted({self._counts[number] for number in self._cut.tied[name]})
            if len(counts) > 1:
                raise InputError(
                    f"{name} is shared by stages of {counts[0]} and of {counts[-1]} shards; write the same number of "
                    "shards for them"
                )


def _modules(part: Part) -> set[str]:
    """Those that hold parameters."""
    return {name.rpartition(".")[0] for name, _ in part.module.named_parameters()}


def _matches(pattern: str, modules: Collection[str]) -> bool:
    return any(fnmatchcase(module, pattern) for module in modules)


def _flowing(part: Part) -> set[Node]:
    """The places of a part's graph through which gradients go back to other parts."""
    places = part.module.graph.find_nodes(op="placeholder")
    return set(places[len(part.inputs) :])
