"""Rewrite a model's graph for one shard: each operator as its strategy emits it, and the redistributions between."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from paceline.replica.module_utils import get_or_create_submodule, tensors_of
from paceline.replica.tensor.base import GraphEmitter
from paceline.replica.tensor.branch_on_rank import STANDS_FOR
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard
from paceline.replica.tensor.plan_search import SearchStep
from paceline.replica.tensor.redistribute import Redistribute, ValueKey, cheapest_source
from paceline.replica.tensor.sharding_plan import ShardingPlan
from paceline.replica.tensor.tp_group import TPCollectives


@dataclass(frozen=True)
class ShardGraph:
    """The graph of one shard of a model."""

    module: GraphModule
    """forward(*leaves of the input) -> tuple of the output's leaves, whole unless ``total`` is put off; holds the parts
    of the shard, by full name."""
    parameters: Mapping[str, Placement]
    """Placement of each of them, buffers included."""
    total: Redistribute | None = None
    """Sums the shards' terms of the only output; None: it needs no sum, or there are several outputs."""


def rewrite_for_shard(plan: ShardingPlan, shards: TPCollectives) -> ShardGraph:
    """Return the shard's graph; its tensors are copies, but for those that every shard has.

    Args:
        plan: the plan, the same on all shards.
        shards: the group, as this shard sees it.
    """
    rewriter = _Rewriter(plan, shards)
    steps = {step.call.node: step for step in plan.steps}
    for node in plan.graph.captured.module.graph.nodes:
        rewriter.rewrite(node, steps.get(node))
    rewriter.graph.eliminate_dead_code(  # a stand-in that no node uses is not needed
        lambda node: STANDS_FOR not in node.meta and (node.op != "call_function" or node.is_impure())
    )
    return ShardGraph(GraphModule(rewriter.root, rewriter.graph, "Shard"), plan.parameters, rewriter.total)


def add_unused_tensors(shard: ShardGraph, module: nn.Module) -> None:
    """Add to a shard the tensors of a model that its graph does not use: they belong to A as well."""
    for name, tensor in tensors_of(module).items():
        if name not in shard.parameters:
            _put(shard.module, name, tensor)


def _put(root: nn.Module, name: str, value: Any) -> None:
    """Register a parameter, buffer or constant of a module under its full name."""
    path, _, leaf = name.rpartition(".")
    owner = get_or_create_submodule(root, path)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(leaf, value)
    else:
        setattr(owner, leaf, value)


class _Rewriter:
    def __init__(self, plan: ShardingPlan, shards: TPCollectives) -> None:
        self._plan, self._shards = plan, shards
        self.graph, self.root = Graph(), nn.Module()
        self._emitter = GraphEmitter(shards, self.graph, self.root, self._local)
        self._placed: dict[tuple[ValueKey, Placement], Node] = {}
        """(tensor, placement) -> node of the shard's graph."""
        self._nodes: dict[Node, Node] = {}
        """Node of the model's graph -> node of the shard's, in its own placement."""
        self._inputs: dict[Node, Node] = {}
        """The same for the inputs of the current operator, in the placements that its strategy takes."""
        self._items = set[Node]()
        """Tensors that stand for a tuple of which they are one, since a tuple can't be redistributed."""
        self.total: Redistribute | None = None
        """See :class:`ShardGraph`."""

    def _local(self, node: Node) -> Node:
        return self._inputs.get(node) or self._nodes[node]

    def rewrite(self, node: Node, step: SearchStep | None) -> None:
        """Emit a node of the model's graph."""
        placement: Placement = REPLICATE
        if node.op == "output":
            self.emit_output(node)
            return
        if step is not None:
            self.emit_operator(step)
            return
        if node.op == "get_attr":  # a parameter, buffer or constant: this shard's part of it
            name = str(node.target)
            placement = self._plan.parameters.get(name, REPLICATE)
            if isinstance(placement, OnRank) and placement.shard != self._shards.rank:
                return
            value = attrgetter(name)(self._plan.graph.captured.module)
            if isinstance(placement, Shard):
                # A copy, or the memory of the whole tensor could not be released.
                part = placement.take(value.detach(), self._shards.rank).clone()
                value = nn.Parameter(part, value.requires_grad) if isinstance(value, nn.Parameter) else part
            _put(self.root, name, value)
            self._nodes[node] = self.graph.get_attr(name)
        else:
            self._nodes[node] = self.graph.node_copy(node, self._local)
        for tensor in self._plan.graph.values.get(node, ()):
            self._placed[tensor.key, placement] = self._nodes[node]

    def emit_operator(self, step: SearchStep) -> None:
        placed, call, strategy = self._placed, step.call, step.strategy
        for value, before, after in step.redistributions:
            source = placed[value.key, before]
            if not value.differentiable and (before, after) == (REPLICATE, PARTIAL_GRAD):
                placed[value.key, after] = source  # the two differ in gradients alone
                continue
            if call.target is getitem and source not in self._items:
                source = self.graph.call_function(getitem, (source, call.node.args[1]))
            module = Redistribute(self._shards, value.node.name, before, after)
            placed[value.key, after] = self._emitter.module(module, source)
            if call.target is getitem:
                self._items.add(placed[value.key, after])
        self._inputs = {
            value.node: node
            for value, placement in zip(call.inputs, strategy.inputs, strict=True)
            if (node := placed.get((value.key, placement))) is not None
        }
        items = [node for node in self._inputs.values() if node in self._items] if call.target is getitem else []
        emitted = items[0] if items else (strategy.emit or GraphEmitter.copy)(self._emitter, call)
        self._inputs = {}
        self._nodes[call.node] = emitted
        for value, placement in zip(call.outputs, strategy.outputs, strict=True):
            placed[value.key, placement] = emitted

    def emit_output(self, node: Node) -> None:
        outputs = self._plan.graph.outputs()
        for value in outputs:
            placed = {place: source for (key, place), source in self._placed.items() if key == value.key}
            if REPLICATE not in placed:
                before = cheapest_source(value, frozenset(placed), self._shards.count)
                module = Redistribute(self._shards, value.node.name, before, REPLICATE)
                self.total = module if before == PARTIAL and len(outputs) == 1 else None
                placed[REPLICATE] = self._emitter.module(module, placed[before])
            self._inputs[value.node] = placed[REPLICATE]
        self.graph.output(map_arg(node.args[0], self._local))
