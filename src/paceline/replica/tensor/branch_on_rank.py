"""Branches that one shard computes alone: their operators, what the other shards have instead, and the join.

The owner runs the operator itself. The others run nothing: where the branch ends they have a *stand-in*, a tensor of
the right shape whose elements are never read, through which autograd finds its way back to the trunk on all shards
alike. Only what draws random numbers they run as well, so that all go on from the same generator state.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.replica.tensor.base import GraphEmitter, GraphTensor, OpCall, OpStrategy, aten
from paceline.replica.tensor.placements import PARTIAL_GRAD, REPLICATE, OnRank, Placement, Shard, memory_order
from paceline.replica.tensor.redistribute import with_memory_order
from paceline.replica.tensor.tp_group import CollectiveModule, TPCollectives

# Name of the strategy of each operator in a branch.
BRANCH = "branch"

# Key in the metadata of a stand-in's node, which can be left out where it has no user: nodes of the trunk from which
# its branch is computed.
STANDS_FOR = "stands_for"


@final
class Extent:
    """Shape of a tensor that is not computed, from those of the model's inputs.

    Args:
        like: the tensor as it was captured.
        inputs: inputs of the model, as they were captured.
    """

    def __init__(self, like: Tensor, inputs: Sequence[Tensor]) -> None:
        self._sizes: list[Any] = [size if isinstance(size, int) else size.node.expr for size in like.shape]
        wanted = {symbol for size in self._sizes if not isinstance(size, int) for symbol in size.free_symbols}
        dims: dict[Any, tuple[int, int]] = {}
        for index, tensor in enumerate(inputs):
            for dim, size in enumerate(tensor.shape):
                if not isinstance(size, int) and size.node.expr in wanted:
                    dims.setdefault(size.node.expr, (index, dim))
        self.inputs = sorted({index for index, _ in dims.values()})
        """Indices of the inputs whose shapes it needs."""
        self._dims = [(symbol, self.inputs.index(index), dim) for symbol, (index, dim) in dims.items()]
        self.complete = wanted == dims.keys()
        """True if the inputs determine the whole shape."""
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the shape with those inputs."""
        lengths = tuple(inputs[index].shape[dim] for _, index, dim in self._dims)
        if lengths not in self._shapes:  # substitution in sympy is slow
            values = {symbol: length for (symbol, _, _), length in zip(self._dims, lengths, strict=True)}
            self._shapes[lengths] = tuple(s if isinstance(s, int) else int(s.subs(values)) for s in self._sizes)
        return self._shapes[lengths]


@final
class StandIn(nn.Module):
    """Make a tensor of the right shape and any elements.

    Args:
        extent: its shape.
        like: the tensor as it was captured, for its dims' order in memory.
        differentiable: True if autograd has to go through it, even if nothing before it has a gradient.
    """

    def __init__(self, extent: Extent, like: Tensor, *, differentiable: bool) -> None:
        super().__init__()
        self._extent, self._order, self._dtype = extent, memory_order(like), like.dtype
        # Without an input that has a gradient autograd would not call backward, and collectives would wait for it.
        self._anchor = torch.zeros((), requires_grad=True) if differentiable else None

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the stand-in.

        Args:
            tensors: the inputs that its extent needs, then the tensors of the trunk from which the owner's is computed.
        """
        count = len(self._extent.inputs)
        shape, device = self._extent.of(tensors[:count]), tensors[0].device if tensors else torch.device("cpu")
        empty = torch.empty_permuted(shape, self._order, dtype=self._dtype, device=device)
        if self._anchor is None:
            return empty
        linked: Tensor = _StandInFunction.apply(empty, self._anchor, *tensors[count:])  # type: ignore[no-untyped-call]
        return linked


class _StandInFunction(torch.autograd.Function):
    """A link back to the sources, without a gradient."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sources = len(sources)
        return empty

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        return (None,) * (1 + ctx.sources)


def model_inputs(node: Node) -> list[Node]:
    """Return the tensor inputs of a node's graph; a part of a model may have sizes as inputs, too."""
    return [each for each in node.graph.find_nodes(op="placeholder") if isinstance(each.meta["val"], Tensor)]


def _result_extent(call: OpCall) -> tuple[Tensor, Extent]:
    """Return an operator's tensor, or the first of them, as it was captured, and its extent."""
    result = call.node.meta["val"]
    tensor = result if isinstance(result, Tensor) else next(each for each in result if isinstance(each, Tensor))
    return tensor, Extent(tensor, [node.meta["val"] for node in model_inputs(call.node)])


def _draws_random(call: OpCall) -> bool:
    """Return True if an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    schema = enumerate(call.target._schema.arguments)
    values = {argument.name: call.argument(i, argument.name, argument.default_value) for i, argument in schema}
    off = any(values.get(name) == 0 for name in ("p", "dropout_p", "dropout"))
    return not off and values.get("train", True) and values.get("training", True)


def belongs_to(value: GraphTensor, branch: frozenset[Node]) -> bool:
    """Return True if a tensor is computed or used in a branch and nowhere else."""
    if value.parameter is not None:
        return all(user in branch for user in value.node.users)
    return value.node in branch


def is_movable(call: OpCall, branch: frozenset[Node]) -> bool:
    """Return True if one shard can compute an operator, with the rest of its branch.

    What writes into a tensor in place can't be moved, since the trunk may be that tensor. What draws random numbers is
    run by all shards, which then need its inputs; and where it isn't run, the size of its result has to be known.
    """
    own_parameters = any(v.parameter is not None and belongs_to(v, branch) for v in call.inputs)
    if call.mutates or (own_parameters and _draws_random(call)):
        return False
    return not call.outputs or _result_extent(call)[1].complete


def branch_strategy(call: OpCall, branch: frozenset[Node], owner: OnRank, share: float) -> OpStrategy:
    """Return the strategy of an operator of a branch: the owner runs it, the others have a stand-in."""
    inputs = tuple(owner if belongs_to(value, branch) else value.replicated for value in call.inputs)

    def emit(emitter: GraphEmitter, call: OpCall) -> Node:
        if emitter.shards.rank == owner.shard or not call.outputs:
            return emitter.copy(call)
        if _draws_random(call):  # all generators stay in the same state
            emitter.copy(call)
        # Sources of a stand-in are the trunk's nodes: where an input is a stand-in itself, those that it stands for.
        sources = [
            emitter.local(value.node)
            for value, placement in zip(call.inputs, inputs, strict=True)
            if value.differentiable and not (value.parameter is not None and placement == owner)
        ]
        trunk = tuple(dict.fromkeys(each for node in sources for each in node.meta.get(STANDS_FOR, (node,))))
        (like, extent), placeholders = _result_extent(call), model_inputs(call.node)
        sized_by = (emitter.local(placeholders[index]) for index in extent.inputs)
        module = StandIn(extent, like, differentiable=call.outputs[0].differentiable)
        node = emitter.module(module, *sized_by, *trunk)
        node.meta[STANDS_FOR] = trunk
        return node

    return OpStrategy(inputs, tuple(owner for _ in call.outputs), BRANCH, emit, share)


def join_strategies(call: OpCall, owners: Sequence[OnRank | None]) -> Iterator[OpStrategy]:
    """Yield the strategies of a concatenation of branches.

    Each shard sends its own tensors, and has the whole; or keeps them as its part, where they are next to each other.
    Other joins have the strategies of their rules: a sum is one of terms of which each shard has its own.

    Args:
        call: the operator that joins.
        owners: owner of each input; None: all shards have it.
    """
    if call.target is not aten.cat.default or call.repeats_input or not any(owners):
        return
    (output,) = call.outputs
    dim = call.argument(1, "dim", 0) % output.dims
    part = _kept_parts(owners, [value.shape[dim] for value in call.inputs], dim - output.dims, call.shards)
    if part is not None:

        def emit_own(emitter: GraphEmitter, call: OpCall) -> Node:
            pairs = zip(owners, call.inputs, strict=True)
            own = [emitter.local(value.node) for owner, value in pairs if owner == OnRank(emitter.shards.rank)]
            return emitter.graph.call_function(aten.cat.default, (own, dim))

        yield OpStrategy(tuple(owner for owner in owners if owner), (part,), "join", emit_own, part.share)

    def emit_join(emitter: GraphEmitter, call: OpCall, *, partial_grad: bool) -> Node:
        ranks = [None if owner is None else owner.shard for owner in owners]
        module = Join(emitter.shards, call.node.name, ranks, dim, partial_grad=partial_grad)
        return emitter.module(module, *(emitter.local(value.node) for value in call.inputs))

    gathered = sum(value.nbytes for value, owner in zip(call.inputs, owners, strict=True) if owner)
    sent = gathered * (call.shards - 1) / call.shards
    for placement in (REPLICATE, PARTIAL_GRAD) if output.differentiable else (REPLICATE,):
        inputs: tuple[Placement, ...] = tuple(
            owner or (placement if value.differentiable else REPLICATE)
            for owner, value in zip(owners, call.inputs, strict=True)
        )
        rounds = 2 if placement == PARTIAL_GRAD else 1
        emit = partial(emit_join, partial_grad=placement == PARTIAL_GRAD)
        yield OpStrategy(inputs, (placement,), "join", emit, 1.0, rounds * sent, rounds)


def _kept_parts(owners: Sequence[OnRank | None], lengths: Sequence[int], dim: int, shards: int) -> Shard | None:
    """Return how the result is sharded where each shard keeps its own; None: they are apart, or some have none.

    >>> _kept_parts([OnRank(0), OnRank(0), OnRank(1)], [2, 3, 4], -1, 2)
    Shard(dim=-1, sizes=(5, 4), blocks=1)
    """
    ranks = [owner.shard for owner in owners if owner is not None]
    if len(ranks) < len(owners) or ranks != sorted(ranks) or set(ranks) != set(range(shards)):
        return None
    sizes = [0] * shards
    for rank, length in zip(ranks, lengths, strict=True):
        sizes[rank] += length
    return Shard(dim, tuple(sizes))


@final
class Join(CollectiveModule):
    """Concatenate tensors on each shard; those of another shard only have their shape.

    Args:
        shards: the group.
        name: name of the result, for messages of ranks that wait.
        owners: owner of each tensor; None: all shards have it.
        dim: dim along which they are joined.
        partial_grad: True if each shard has a term of the result's gradient, rather than all of it.
    """

    def __init__(
        self, shards: TPCollectives, name: str, owners: Sequence[int | None], dim: int, *, partial_grad: bool
    ) -> None:
        super().__init__(shards, name)
        self.owners, self.dim, self.partial_grad = list(owners), dim, partial_grad

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the whole tensor."""
        whole: Tensor = self.differentiable(*tensors)
        return whole

    def value(self, ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.lengths = lengths = [tensor.shape[self.dim] for tensor in tensors]
        shapes = list[tuple[int, ...]]()
        for shard in range(self.shards.count):
            shape = list(tensors[0].shape)
            shape[self.dim] = sum(self._of(lengths, shard))
            shapes.append(tuple(shape))
        gathered = self.shards.all_gather(self._cat_of(tensors, self.shards.rank, tensors[0]), shapes, self.name)
        pieces = [iter(torch.split(part, self._of(lengths, s), self.dim)) for s, part in enumerate(gathered)]
        pairs = zip(tensors, self.owners, strict=True)
        ordered = [tensor if owner is None else next(pieces[owner]) for tensor, owner in pairs]
        return with_memory_order(torch.cat(ordered, self.dim), tensors[0])

    def gradients(self, ctx: Any, gradient: Tensor) -> list[Tensor | None]:
        """Return the gradient of each tensor; None for one of another shard."""
        rank, terms = self.shards.rank, list(torch.split(gradient, ctx.lengths, self.dim))
        if self.partial_grad:
            parts = [self._cat_of(terms, shard, gradient) for shard in range(self.shards.count)]
            total = self.shards.reduce_scatter(parts, f"the gradient of {self.name}")
            sums = iter(torch.split(total, self._of(ctx.lengths, rank), self.dim))
            terms = [next(sums) if owner == rank else term for owner, term in zip(self.owners, terms, strict=True)]
        return [term if owner in (None, rank) else None for owner, term in zip(self.owners, terms, strict=True)]

    def _of(self, values: Sequence[Any], shard: int) -> list[Any]:
        """Return those of a shard's tensors."""
        return [value for value, owner in zip(values, self.owners, strict=True) if owner == shard]

    def _cat_of(self, tensors: Sequence[Tensor], shard: int, like: Tensor) -> Tensor:
        """Return a shard's tensors, one after the other; it may have none."""
        # An empty tensor where it has none: a collective takes one of each shard.
        own = self._of(tensors, shard)
        return torch.cat(own, self.dim) if own else like.narrow(self.dim, 0, 0)
