"""What a rule is: how an operator may be divided among shards, and what it is then written as.

A rule gives *ways*. A way says in which layout the operator takes each tensor and gives each result, and writes the
operator of one shard. The plan chooses one way for each operator and pays for the conversions between them::

    x Shared --+                                            column: S_p = a part of the rows of W, and of b
    W Split(0) +-- linear --> Split(-1) -- relu --> Split(-1) --+
    b Split(0) +                                                +-- linear --> Partial -- all-reduce --> Whole
                                              V Split(1) -------+            row: S_p = a part of the columns of V

A new rule is a file in ``rules/`` that ends in ``register(...)``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, Placement, Shard, even_sizes
from paceline.replica.tensor.tp_group import TPCollectives

Cuts: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""Length of a dim -> (blocks, elements that stay together) in which it can be divided; see units.py."""


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the graph, apart from its elements."""

    node: Node
    shape: tuple[int, ...]
    """With the sizes of the few samples that were captured with."""
    dtype: torch.dtype
    differentiable: bool
    """Whether it has a gradient."""
    parameter: str | None = None
    """Its full name, where it is a parameter or a buffer of the model."""
    index: int = 0
    """Which one of its node's."""
    elements: int | None = None
    """In the batch that is planned for; None: as many as its shape says."""

    @property
    def dims(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the batch that is planned for."""
        elements = torch.Size(self.shape).numel() if self.elements is None else self.elements
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class OpCall:
    """One operator of the graph."""

    node: Node
    inputs: tuple[GraphTensor, ...]
    """The tensors among its arguments, in order, those of lists in their place."""
    outputs: tuple[GraphTensor, ...]
    """Its results: one, or those of a tuple."""
    shards: int
    """k."""
    divisions: Cuts = field(repr=False)

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def mutates(self) -> bool:
        """Whether it writes into a tensor that it takes, and says so."""
        return bool(getattr(getattr(self.target, "_schema", None), "is_mutable", False))

    @property
    def repeats(self) -> bool:
        """Whether one tensor is two of its arguments: ``takes`` has it once."""
        given = list[Node]()
        map_arg((self.node.args, self.node.kwargs), lambda node: given.append(node) or node)  # type: ignore[func-returns-value]
        return len(given) > len(set(given))

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """One that is no tensor, or the node of one, by its place or name."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def shardings(self, length: int, dim: int) -> Iterator[Shard]:
        """The ways to divide a dim of this length evenly; none where there are fewer units than shards."""

        for blocks, unit in self.divisions.get(length, ((1, 1),)):
            units = length // (blocks * unit)
            if units >= self.shards:
                yield Shard(dim, tuple(unit * share for share in even_sizes(units, self.shards)), blocks)


Available: TypeAlias = Sequence[frozenset[Placement]]
"""In which layouts each tensor that an operator takes can be had without giving anything up that was divided."""


@dataclass(frozen=True)
class OpStrategy:
    """One way to divide an operator."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    name: str = ""
    """As the table and an override have it: column, row, heads. Empty: it does what its tensors' layouts say."""
    emit: "Emit | None" = None
    """Writes the operator of one shard; None: the same operator on the shards' parts."""
    share: float = 1.0
    """Of the operator's work that the largest shard does."""
    sent_bytes: float = 0.0
    """Bytes that the written operator itself sends from each shard, forward and backward."""
    collectives: int = 0
    """That it itself makes, forward and backward."""
    on_request: bool = False
    """Whether it is only for those who ask for it by name."""


class GraphEmitter:
    """Writes the graph of one shard.

    Args:
        shards: who work together; modules that send need it.
        graph: is written to.
        root: holds the modules that the graph calls.
        local: node of the model's graph -> what stands for it, in the layout that the way which is written asks for.
    """

    def __init__(self, shards: TPCollectives, graph: Graph, root: nn.Module, local: Callable[[Node], Node]) -> None:
        self.shards, self._graph, self._root, self.local = shards, graph, root, local
        self._modules = 0

    def call(self, target: Callable[..., Any], *args: Argument, **kwargs: Argument) -> Node:
        """A call of a function."""
        return self._graph.call_function(target, args, kwargs)

    def module(self, module: nn.Module, *args: Argument) -> Node:
        """A call of a module without tensors of its own."""
        name = f"_{type(module).__name__.lower()}_{self._modules}"
        self._modules += 1
        self._root.add_module(name, module)
        return self._graph.call_module(name, args)

    def copy(self, call: OpCall) -> Node:
        """The operator itself."""
        return self._graph.node_copy(call.node, self.local)

    def same(self, call: OpCall, /, **changed: Argument) -> Node:
        """The operator itself, with some of its arguments changed, by their names in its schema."""
        names = [argument.name for argument in call.target._schema.arguments]
        args = [
            changed.pop(name) if name in changed else map_arg(arg, self.local)
            for name, arg in zip(names, call.node.args, strict=False)
        ]
        given = {name: value for name, value in call.node.kwargs.items() if name not in changed}
        kwargs = {name: map_arg(value, self.local) for name, value in given.items()} | changed
        return self._graph.call_function(call.target, tuple(args), kwargs)


Emit: TypeAlias = Callable[[GraphEmitter, OpCall], Node]


class OpRule(ABC):
    """How one family of operators is divided. Its docstring states its IC equation: which part S_p a shard owns."""

    targets: ClassVar[tuple[Any, ...]]
    """The operators, as ``torch.ops.aten.linear.default``."""

    converts: ClassVar[bool] = True
    """Whether its tensors may be converted for it; False: it takes them as they were made, if it can."""

    repeats: ClassVar[bool] = False
    """Whether it can tell what to do where one tensor is two of the arguments; False: that is left undivided."""

    @abstractmethod
    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        """The ways to divide it beside those of :func:`undivided`, which are always there."""


def replicated_strategies(call: OpCall) -> Iterator[OpStrategy]:
    """Every shard does all of it: with whole gradients, or with terms of them."""
    for layout in (REPLICATE, PARTIAL_GRAD):
        inputs = tuple(layout if value.differentiable else REPLICATE for value in call.inputs)
        outputs = tuple(layout if value.differentiable else REPLICATE for value in call.outputs)
        yield OpStrategy(inputs, outputs)
        if not any(value.differentiable for value in (*call.inputs, *call.outputs)):
            return


def replicated(value: GraphTensor) -> Placement:
    """What a tensor is that every shard computes its part with."""
    return PARTIAL_GRAD if value.differentiable else REPLICATE


_RULES: dict[Any, OpRule] = {}


def sharded_strategies(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """The ways that its rule has, if there is one."""
    rule = rule_of(call.target)
    if rule is not None and (rule.repeats or not call.repeats):
        yield from rule.strategies(call, available)


def functional_overloads(names: Iterable[str]) -> Iterator[Any]:
    """Of torch's operators of these names, as far as this torch has them, all forms that write into nothing."""
    for packet in (getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)):
        found = (getattr(packet, overload) for overload in packet.overloads())
        yield from (form for form in found if not form._schema.is_mutable)


def register(rule: OpRule) -> None:
    """Have it asked about its operators."""
    for target in rule.targets:
        assert target not in _RULES, f"{target} has a rule"
        _RULES[target] = rule


def rule_of(target: Any) -> OpRule | None:
    """The rule of an operator."""
    return _RULES.get(target)


def shards_among(available: Iterable[Placement]) -> Iterator[Shard]:
    """The splits among some layouts, in an order that is the same everywhere."""
    return iter(sorted((o for o in available if isinstance(o, Shard)), key=lambda s: (s.dim, s.blocks, s.sizes)))
