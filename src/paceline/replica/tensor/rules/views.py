"""Operators that move elements without changing them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from math import prod
from operator import floordiv, getitem, mul
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from paceline.replica.tensor import base
from paceline.replica.tensor.base import (
    Emit,
    GraphEmitter,
    OpCall,
    OpStrategy,
    aten,
    parameter_shardings,
    shards_among,
)
from paceline.replica.tensor.graph_ops import PIECES, RESHAPES, matching_dims
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

# (Sharding of each result, what emits the operator, None: it stays as it is); None: there is no such sharding.
Moved: TypeAlias = tuple[Shard, Emit | None] | None


def view_rule(*targets: Any) -> Callable[[Callable[[OpCall, Shard], Moved]], base.OpRule]:
    """Decorate a function as the rule of operators that move elements: S_p is the part of the tensor that was sharded.

    It is so wherever that part goes, and a sum of terms stays one. A parameter is sharded along any dim.
    """

    def rule(moved: Callable[[OpCall, Shard], Moved]) -> base.OpRule:
        def strategies(call: OpCall, available: base.Available) -> Iterator[OpStrategy]:
            for split in dict.fromkeys((*shards_among(available[0]), *parameter_shardings(call, call.inputs[0]))):
                result = moved(call, split)
                if result is not None:
                    outputs = tuple(result[0] for _ in call.outputs)
                    yield OpStrategy((split,), outputs, emit=result[1], share=split.share)
            yield from call.partial_strategies(available)

        return base.op_rule(*targets, redistributes=False)(wraps(moved)(strategies))

    return rule


def reshaped(split: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """Return a sharding after a reshape; None: parts would no longer be parts of one dim.

    >>> reshaped(Shard(-1, (8, 8), blocks=3), (5, 48), (5, 3, 2, 8))
    Shard(dim=-2, sizes=(1, 1), blocks=1)
    >>> reshaped(Shard(-3, (1, 1)), (5, 2, 7, 8), (10, 7, 8))
    Shard(dim=-3, sizes=(1, 1), blocks=5)
    """
    place = split.dim % len(before)
    for new_dims, old_dims in matching_dims(before, after):
        if place not in old_dims:
            continue
        # As if all of these dims were one: slower ones are more blocks, faster ones make parts longer.
        index = old_dims.index(place)
        blocks = split.blocks * prod(before[i] for i in old_dims[:index])
        inner = prod(before[i] for i in old_dims[index + 1 :])
        sizes = [size * inner for size in split.sizes]
        # Then the new dim along which the parts lie.
        for index, dim in enumerate(new_dims):
            slower, faster = prod(after[i] for i in new_dims[:index]), prod(after[i] for i in new_dims[index + 1 :])
            if blocks % slower or any(size % faster for size in sizes):
                continue
            result = Shard(dim - len(after), tuple(size // faster for size in sizes), blocks // slower)
            if result.length == after[dim]:
                return result
        return None
    return None


def local_sizes(emitter: GraphEmitter, sizes: Any, split: Shard) -> list[Any]:
    """Return the sizes of an operator's argument, of which one is a shard's part, for this shard."""
    local = [emitter.local(size) if isinstance(size, Node) else size for size in sizes]
    own, size = split.sizes[emitter.shards.rank], local[split.dim]
    if isinstance(size, int):
        local[split.dim] = size if size == -1 else size // split.block_size * own
    else:
        units = emitter.graph.call_function(floordiv, (size, split.block_size))
        local[split.dim] = emitter.graph.call_function(mul, (units, own))
    return local


@view_rule(*RESHAPES)
def reshape(call: OpCall, split: Shard) -> Moved:
    """The same elements in another shape: S_p stays one where the dim is made of whole ones, or into whole ones."""
    output = reshaped(split, call.inputs[0].shape, call.outputs[0].shape)
    if output is None or call.target is aten.flatten.using_ints:
        return None if output is None else (output, None)
    if call.target is aten.unflatten.int:  # the sizes are those of the dims that one becomes
        sizes = call.argument(2, "sizes")
        place = output.dim % call.outputs[0].dims - call.argument(1, "dim") % call.inputs[0].dims
        if not 0 <= place < len(sizes):
            return output, None
        own = output.at(place - len(sizes))
        return output, lambda emitter, call: emitter.with_args(call, sizes=local_sizes(emitter, sizes, own))
    name = call.target._schema.arguments[1].name
    return output, lambda emitter, call: emitter.with_args(
        call, **{name: local_sizes(emitter, call.argument(1, name), output)}
    )


@view_rule(aten.transpose.int, aten.permute.default, aten.movedim.int, "t", "mT", "numpy_T")
def transpose(call: OpCall, split: Shard) -> Moved:
    """Dims in another order: S_p is the part that was sharded."""
    dims = call.inputs[0].dims
    probe = torch.empty([1] * dims)
    probe = probe.as_strided([1] * dims, list(range(1, dims + 1)))  # strides name the dims
    moved = call.target(probe, *call.node.args[1:])
    return split.at(moved.stride().index(split.dim % dims + 1) - dims), None


@view_rule(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
def unsqueeze(call: OpCall, split: Shard) -> Moved:
    """A dim of one element more, or less: S_p is the part that was sharded."""
    (value,) = call.inputs
    if call.target is not aten.unsqueeze.default and split.dim % value.dims in call.dims_named("dim"):
        return None  # a part may be one element long where the whole is not
    output = reshaped(split, value.shape, call.outputs[0].shape)
    return None if output is None or output.length != split.length else (output, None)


@view_rule(aten.expand.default, aten.expand_as.default)
def expand(call: OpCall, split: Shard) -> Moved:
    """Dims of one element, repeated: S_p is the part that was sharded, along another dim."""
    if call.target is not aten.expand.default or call.outputs[0].shape[split.dim] != split.length:
        return None
    sizes = call.argument(1, "size")
    return split, lambda emitter, call: emitter.with_args(call, size=local_sizes(emitter, sizes, split))


@view_rule(*PIECES)
def pieces(call: OpCall, split: Shard) -> Moved:
    """Pieces of one dim, as a tuple: S_p is the part that was sharded, of equally long pieces along that dim."""
    dims, count, unbinds = call.inputs[0].dims, len(call.outputs), call.target is aten.unbind.int
    dim = call.argument(1 if unbinds else 2, "dim", 0) % dims
    even = len({value.shape for value in call.outputs}) == 1
    if dim != split.dim % dims:
        output = split.at(split.dim + (1 if unbinds and split.dim % dims < dim else 0))
    elif call.target is aten.chunk.default and call.argument(1, "chunks") != count:
        return None  # of parts it would make another number of pieces
    elif unbinds or not even or split.blocks % count:
        return None
    else:
        output = Shard(split.dim, split.sizes, split.blocks // count)
    if unbinds or call.target is aten.chunk.default or output == split:  # equal pieces, or another dim
        return output, None
    sizes: Any = call.argument(1, "split_size")
    if call.target is aten.split.Tensor:
        by_shard = [sizes // split.block_size * own for own in split.sizes]
        return output, partial(GraphEmitter.with_own_args, split_size=by_shard)
    lists = [[size // split.block_size * own for size in sizes] for own in split.sizes]
    return output, partial(GraphEmitter.with_own_args, split_sizes=lists)


@base.op_rule(getitem, redistributes=False)
def tuple_item(call: OpCall, available: base.Available) -> Iterator[OpStrategy]:
    """One of a tuple."""
    terms: list[Placement] = [PARTIAL] if PARTIAL in available[0] and len(call.inputs) == 1 else []
    for placement in [*shards_among(available[0]), *terms]:
        yield OpStrategy((placement,), (placement,))
