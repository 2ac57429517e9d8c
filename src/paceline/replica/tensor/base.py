"""Rules of tensor parallelism: the op strategies of an operator, and what each emits for one shard.

A rule gives strategies. A strategy names the placement of each input and output, and emits the operator of one
shard. The plan chooses one strategy for each operator and pays for the redistributions between them::

    x ReplicatePartialGrad -+                                           column: S_p = some rows of W, and of b
    W Shard(0) -------------+- linear -> Shard(-1) - relu -> Shard(-1) -+
    b Shard(0) -------------+                                           +- linear -> Partial - all-reduce -> Replicate
                                                 V Shard(1) ------------+           row: S_p = some columns of V

A new rule is a file in ``rules/`` with a function under ``@op_rule(...)``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, Placement, Shard, even_sizes
from paceline.replica.tensor.tp_group import TPCollectives

aten = torch.ops.aten

# Length of a dim -> (blocks, elements that stay together) in which it can be divided; see graph_ops.py.
Divisions: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the graph, without its elements."""

    node: Node
    shape: tuple[int, ...]
    """Shape with the small batch that was captured with."""
    dtype: torch.dtype
    differentiable: bool
    """True if it has a gradient."""
    parameter: str | None = None
    """Full name of a parameter or buffer of the model; None: it is computed."""
    index: int = 0
    """Index among the results of its node."""
    elements: int | None = None
    """Elements in the batch that is planned for; None: as many as the shape says."""

    @property
    def key(self) -> tuple[str, int]:
        """Key in the tables of a plan: name of the node, index of the result."""
        return self.node.name, self.index

    @property
    def dims(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the batch that is planned for."""
        elements = torch.Size(self.shape).numel() if self.elements is None else self.elements
        return elements * self.dtype.itemsize

    @property
    def replicated(self) -> Placement:
        """Placement where every shard has the tensor and uses it for its part of the work."""
        return PARTIAL_GRAD if self.differentiable else REPLICATE


@dataclass(frozen=True)
class OpCall:
    """One operator of the graph."""

    node: Node
    inputs: tuple[GraphTensor, ...]
    """Tensors among its arguments, in order, those of lists in their place."""
    outputs: tuple[GraphTensor, ...]
    """Its results: one, or those of a tuple."""
    shards: int
    """k, number of shards."""
    divisions: Divisions = field(repr=False)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def op_name(self) -> str:
        """Name of the operator: of aten's without namespace and overload."""
        words = str(self.target).split(".")
        return words[1] if words[0] == "aten" and len(words) > 1 else str(self.target)

    @property
    def mutates(self) -> bool:
        """True if its schema says that it writes into an argument."""
        return bool(getattr(getattr(self.target, "_schema", None), "is_mutable", False))

    @property
    def repeats_input(self) -> bool:
        """True if one tensor is two of its arguments: ``inputs`` has it once."""
        nodes = nodes_in((self.node.args, self.node.kwargs))
        return len(nodes) > len(set(nodes))

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position or name: a plain value, or the node of a tensor."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def argument_named(self, name: str, default: Any = None) -> Any:
        """Return an argument that only some operators of a family have, or the default."""
        arguments = enumerate(self.target._schema.arguments)
        return next((self.argument(i, name, each.default_value) for i, each in arguments if each.name == name), default)

    def dims_named(self, *names: str) -> set[int]:
        """Return the dims of the first input that the first of these arguments names; all, if it names none."""
        dims, values = self.inputs[0].dims, map(self.argument_named, names)
        value = next((value for value in values if value is not None), ())
        return {dim % dims for dim in (value if isinstance(value, (list, tuple)) else [value])} or set(range(dims))

    def shardings(self, length: int, dim: int) -> Iterator[Shard]:
        """Yield the even divisions of a dim of this length; none where there are fewer units than shards."""
        for blocks, unit in self.divisions.get(length, ((1, 1),)):
            units = length // (blocks * unit)
            if units >= self.shards:
                yield Shard(dim, tuple(unit * size for size in even_sizes(units, self.shards)), blocks)

    def partial_strategies(self, available: "Available") -> "Iterator[OpStrategy]":
        """Yield the strategy of an operator that is linear in its first input: terms of a sum stay terms."""
        if PARTIAL in available[0]:
            others = (value.replicated for value in self.inputs[1:])
            yield OpStrategy((PARTIAL, *others), tuple(PARTIAL for _ in self.outputs))


def nodes_in(arguments: Any) -> list[Node]:
    """Return the nodes among arguments of an operator, in order, each as often as it is there."""
    nodes = list[Node]()
    map_arg(arguments, lambda node: nodes.append(node) or node)  # type: ignore[func-returns-value]
    return nodes


# Placements in which each input of an operator can be without replicating anything that was sharded.
Available: TypeAlias = Sequence[frozenset[Placement]]


@dataclass(frozen=True)
class OpStrategy:
    """One way to shard an operator."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    name: str = ""
    """Name for tables and ``shard_rules``: column, row, heads. Empty: it follows the placements of its inputs."""
    emit: "Emit | None" = None
    """Emits the operator of one shard; None: the same operator on the shards' parts."""
    share: float = 1.0
    """Share of the operator's work that the largest shard does."""
    sent_bytes: float = 0.0
    """Bytes that the emitted operator itself sends from each shard, forward and backward."""
    collectives: int = 0
    """Collectives that it makes itself, forward and backward."""
    on_request: bool = False
    """True if only ``shard_rules`` choose it, by name."""


@dataclass(eq=False)
class GraphEmitter:
    """Emits the nodes of one shard's graph."""

    shards: TPCollectives
    """The group, for modules that communicate."""
    graph: Graph
    root: nn.Module
    """Holds the modules that the graph calls."""
    local: Callable[[Node], Node]
    """Node of the model's graph -> node of the shard's, in the placement that the current strategy takes."""
    _modules: int = 0

    def module(self, module: nn.Module, *args: Argument) -> Node:
        """Emit the call of a module without tensors of its own."""
        name = f"_{type(module).__name__.lower()}_{self._modules}"
        self._modules += 1
        self.root.add_module(name, module)
        return self.graph.call_module(name, args)

    def copy(self, call: OpCall) -> Node:
        """Emit the operator as it is."""
        return self.graph.node_copy(call.node, self.local)

    def with_args(self, call: OpCall, /, **changed: Argument) -> Node:
        """Emit the operator with some of its arguments changed, by their names in its schema."""
        names = [argument.name for argument in call.target._schema.arguments]
        args = [
            changed.pop(name) if name in changed else map_arg(arg, self.local)
            for name, arg in zip(names, call.node.args, strict=False)
        ]
        kept = {name: value for name, value in call.node.kwargs.items() if name not in changed}
        kwargs = {name: map_arg(value, self.local) for name, value in kept.items()} | changed
        return self.graph.call_function(call.target, tuple(args), kwargs)

    def with_own_args(self, call: OpCall, /, **by_shard: Sequence[Argument]) -> Node:
        """Emit the operator with arguments that differ from shard to shard."""
        return self.with_args(call, **{name: values[self.shards.rank] for name, values in by_shard.items()})

    def weighed_mean(self, call: OpCall, split: Shard) -> Node:
        """Emit the mean of a part, weighed by the share of all elements that it is: a term of the mean of all."""
        share = split.sizes[self.shards.rank] / split.block_size
        return self.graph.call_function(aten.mul.Tensor, (self.with_args(call), share))


Emit: TypeAlias = Callable[[GraphEmitter, OpCall], Node]
Strategies: TypeAlias = Callable[[OpCall, Available], Iterator[OpStrategy]]


@dataclass(frozen=True)
class OpRule:
    """Strategies of one family of operators."""

    strategies: Strategies
    """Yields those besides :func:`replicated_strategies`, which are always there."""
    redistributes: bool = True
    """True if inputs may be redistributed for it; False: it takes them as they are, if it can."""
    handles_repeats: bool = False
    """True if it can shard an operator of which one tensor is two arguments; False: that stays replicated."""


_RULES: dict[Any, OpRule] = {}


def op_rule(*targets: Any, redistributes: bool = True, handles_repeats: bool = False) -> Callable[[Strategies], OpRule]:
    """Decorate a function as the rule of operators; its docstring has the IC equation: which part S_p a shard owns.

    Args:
        targets: the operators, as ``torch.ops.aten.linear.default``; a name stands for all overloads of it in aten that
            write into nothing, as far as this torch has them.
        redistributes: see :class:`OpRule`.
        handles_repeats: likewise.
    """

    def overloads(target: Any) -> list[Any]:
        if not isinstance(target, str):
            return [target]
        packet = getattr(aten, target, None)
        every = [getattr(packet, name) for name in packet.overloads()] if packet else []
        return [each for each in every if not each._schema.is_mutable]

    def register(strategies: Strategies) -> OpRule:
        rule = OpRule(strategies, redistributes, handles_repeats)
        for overload in chain.from_iterable(map(overloads, targets)):
            # Two rules for one operator would depend on the order of imports.
            assert overload not in _RULES, f"{overload} has a rule"
            _RULES[overload] = rule
        return rule

    return register


def rule_of(target: Any) -> OpRule | None:
    """Return the rule of an operator."""
    return _RULES.get(target)


def sharded_strategies(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Yield the strategies of an operator's rule, if there is one."""
    rule = rule_of(call.target)
    if rule is not None and (rule.handles_repeats or not call.repeats_input):
        yield from rule.strategies(call, available)


def replicated_strategies(call: OpCall) -> Iterator[OpStrategy]:
    """Yield the strategies by which every shard does all: with whole gradients, or with terms of them."""
    for placement in (REPLICATE, PARTIAL_GRAD):
        inputs, outputs = (
            tuple(placement if value.differentiable else REPLICATE for value in values)
            for values in (call.inputs, call.outputs)
        )
        yield OpStrategy(inputs, outputs)
        if not any(value.differentiable for value in (*call.inputs, *call.outputs)):
            return


def shards_among(*available: Iterable[Placement]) -> list[Shard]:
    """Return the distinct shardings among placements, tensor by tensor, in an order that is the same on all shards."""
    distinct = dict[Shard, None]()
    for each in available:
        shardings = [placement for placement in each if isinstance(placement, Shard)]
        distinct |= dict.fromkeys(sorted(shardings, key=lambda split: (split.dim, split.blocks, split.sizes)))
    return list(distinct)


def parameter_shardings(call: OpCall, value: GraphTensor) -> Iterator[Shard]:
    """Yield the even divisions of a weight, along each of its dims; of any other tensor none."""
    if value.parameter is not None and value.dims > 1:
        for dim in range(-value.dims, 0):
            yield from call.shardings(value.shape[dim], dim)
