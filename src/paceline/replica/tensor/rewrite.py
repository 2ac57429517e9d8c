"""The graph of one shard: each operator as its way writes it, and the conversions between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from paceline.replica.module_utils import get_or_create_submodule, tensors_of
from paceline.replica.tensor.base import GraphEmitter
from paceline.replica.tensor.branch_on_rank import is_stand_in
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.redistribute_cost import ValueKey, cheapest_source, redistribute, value_key
from paceline.replica.tensor.sharding_plan import ShardingPlan
from paceline.replica.tensor.tp_group import TPCollectives


@dataclass(frozen=True)
class ShardGraph:
    """What one shard of a model runs."""

    module: GraphModule
    """forward(*leaves of the input) -> tuple of the output's leaves, whole; holds the shard's parts, by full name."""
    parameters: Mapping[str, Placement]
    """How those lie among the shards, buffers included."""


def rewrite_for_shard(plan: ShardingPlan, shards: TPCollectives) -> ShardGraph:
    """The shard's module; its tensors are copies, but of those that every shard has.

    Args:
        plan: the same on all shards.
        shards: whose graph it is.
    """
    return _Rewriting(plan, shards).shard()


def add_unused_tensors(shard: ShardGraph, module: nn.Module) -> None:
    """Let a shard have the tensors of a model that its graph does not use: they are A's as well."""
    for name, tensor in tensors_of(module).items():
        if name not in shard.parameters:
            put_tensor(shard.module, name, tensor)


class _Rewriting:
    def __init__(self, plan: ShardingPlan, shards: TPCollectives) -> None:
        self._plan, self._shards = plan, shards
        self._graph, self._root = Graph(), nn.Module()
        self._made: dict[tuple[ValueKey, Placement], Node] = {}
        self._plain: dict[Node, Node] = {}
        self._wanted: dict[Node, Node] = {}
        self._writer = GraphEmitter(shards, self._graph, self._root, self._new)

    def shard(self) -> ShardGraph:
        captured = self._plan.graph.captured
        steps = {step.call.node: step for step in self._plan.steps}
        for node in captured.module.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op == "get_attr":
                self._held(node)
            elif node in steps:
                self._step(steps[node])
            else:
                self._plain[node] = self._graph.node_copy(node, self._new)
                for value in self._plan.graph.values.get(node, ()):
                    self._made[value_key(value), REPLICATE] = self._plain[node]
        self._graph.eliminate_dead_code(_has_effects)
        module = GraphModule(self._root, self._graph, "Shard")
        return ShardGraph(module, self._plan.parameters)

    def _held(self, node: Node) -> None:
        """A parameter or buffer, or this shard's part of it."""
        held = attrgetter(str(node.target))(self._plan.graph.captured.module)
        layout: Placement = self._plan.parameters.get(str(node.target), REPLICATE)
        if isinstance(layout, OnRank) and layout.shard != self._shards.rank:
            return
        if isinstance(layout, Shard):
            held = _part(held, layout, self._shards.rank)
        put_tensor(self._root, str(node.target), held)
        self._plain[node] = self._graph.get_attr(str(node.target))
        for value in self._plan.graph.values.get(node, ()):
            self._made[value_key(value), layout] = self._plain[node]

    def _step(self, step: SearchStep) -> None:
        for value, before, after in step.redistributions:
            if not value.differentiable and (before, after) == (
                REPLICATE,
                PARTIAL_GRAD,
            ):  # the two differ in gradients alone
                self._made[value_key(value), after] = self._made[value_key(value), before]
                continue
            module = redistribute(self._shards, value.node.name, before, after)
            self._made[value_key(value), after] = self._writer.module(module, self._made[value_key(value), before])
        self._wanted = {
            value.node: made
            for value, layout in zip(step.call.inputs, step.strategy.inputs, strict=True)
            if (made := self._made.get((value_key(value), layout))) is not None
        }
        written = (step.strategy.emit or GraphEmitter.copy)(self._writer, step.call)
        self._plain[step.call.node] = written
        for value, layout in zip(step.call.outputs, step.strategy.outputs, strict=True):
            self._made[value_key(value), layout] = written
        self._wanted = {}

    def _new(self, node: Node) -> Node:
        return self._wanted.get(node) or self._plain[node]

    def _output(self, node: Node) -> None:
        for value in self._plan.graph.outputs():
            known = {layout: made for (place, layout), made in self._made.items() if place == value_key(value)}
            if REPLICATE in known:
                self._wanted[value.node] = known[REPLICATE]
                continue
            before = cheapest_source(value, frozenset(known), self._shards.count)
            module = redistribute(self._shards, value.node.name, before, REPLICATE)
            self._wanted[value.node] = self._writer.module(module, known[before])
        self._graph.output(map_arg(node.args[0], self._new))


def _has_effects(node: Node) -> bool:
    return not is_stand_in(node) and (node.op != "call_function" or node.is_impure())


def _part(held: Tensor, split: Shard, shard: int) -> Tensor:
    part = split.take(held.detach(), shard).clone()
    return nn.Parameter(part, held.requires_grad) if isinstance(held, nn.Parameter) else part


def put_tensor(root: nn.Module, name: str, held: Any) -> None:
    """Let a module have a parameter, buffer or constant under this full name."""
    path, _, leaf = name.rpartition(".")
    where = get_or_create_submodule(root, path)
    if isinstance(held, nn.Parameter):
        where.register_parameter(leaf, held)
    elif isinstance(held, torch.Tensor):
        where.register_buffer(leaf, held)
    else:
        where.add_module(leaf, held)
