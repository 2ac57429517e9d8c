"""Operators that move elements without changing them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from operator import floordiv, getitem, mul
from typing import Any, ClassVar, final

import torch
from torch.fx import Node

from paceline.replica.tensor.base import (
    Available,
    Emit,
    GraphEmitter,
    OpCall,
    OpRule,
    OpStrategy,
    register,
    shards_among,
)
from paceline.replica.tensor.graph_ops import matching_dims
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


class ViewRule(OpRule):
    """S_p is the part of the tensor that was sharded, wherever it goes; a sum of terms stays one."""

    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        for split in shards_among(available[0]):
            moved = self.moved(call, split)
            if moved is not None:
                output, emit = moved
                outputs = tuple(output for _ in call.outputs)
                yield OpStrategy((split,), outputs, emit=emit, share=split.share)
        yield from call.partial_strategies(available)

    @abstractmethod
    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        """Return the sharding of each result for one of the input, and what emits the operator of one shard.

        None: there is no such sharding, or the emitted operator is the same.
        """


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
        local[split.dim] = emitter.call(mul, emitter.call(floordiv, size, split.block_size), own)
    return local


@final
class Reshape(ViewRule):
    """The same elements in another shape: parts stay parts where the dim is made of whole ones, or into whole ones."""

    targets: ClassVar = (
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int
    )  # fmt: skip

    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        output = reshaped(split, call.inputs[0].shape, call.outputs[0].shape)
        if output is None or call.target is aten.flatten.using_ints:
            return None if output is None else (output, None)
        if call.target is aten.unflatten.int:
            return output, lambda emitter, call: emitter.with_args(call, sizes=_unflattened(emitter, call, output))
        name = call.target._schema.arguments[1].name
        return output, lambda emitter, call: emitter.with_args(
            call, **{name: local_sizes(emitter, call.argument(1, name), output)}
        )


def _unflattened(emitter: GraphEmitter, call: OpCall, split: Shard) -> list[Any]:
    dim, sizes = call.argument(1, "dim") % call.inputs[0].dims, call.argument(2, "sizes")
    place = split.dim % call.outputs[0].dims - dim
    if not 0 <= place < len(sizes):
        return list(sizes)
    return local_sizes(emitter, sizes, split.at(place - len(sizes)))


@final
class Transpose(ViewRule):
    """Dims in another order."""

    targets: ClassVar = (aten.transpose.int, aten.permute.default, aten.t.default, aten.movedim.int)

    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        dims = call.inputs[0].dims
        probe = torch.empty([1] * dims)
        probe = probe.as_strided([1] * dims, list(range(1, dims + 1)))  # strides name the dims
        moved = call.target(probe, *call.node.args[1:])
        return split.at(moved.stride().index(split.dim % dims + 1) - dims), None


@final
class Unsqueeze(ViewRule):
    """A dim of one element more, or less."""

    targets: ClassVar = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)

    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        value, dim = call.inputs[0], call.argument(1, "dim")
        dims = {each % value.dims for each in (dim if isinstance(dim, (list, tuple)) else [dim])}
        if call.target is not aten.unsqueeze.default and split.dim % value.dims in dims:
            return None  # a part may be one element long where the whole is not
        output = reshaped(split, value.shape, call.outputs[0].shape)
        return None if output is None or output.length != split.length else (output, None)


@final
class Expand(ViewRule):
    """Dims of one element, repeated."""

    targets: ClassVar = (aten.expand.default, aten.expand_as.default)

    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        if call.target is not aten.expand.default or call.outputs[0].shape[split.dim] != split.length:
            return None
        sizes = call.argument(1, "size")
        return split, lambda emitter, call: emitter.with_args(call, size=local_sizes(emitter, sizes, split))


@final
class Chunks(ViewRule):
    """Pieces of one dim, as a tuple: of the same length each, where it is the one that was sharded."""

    targets: ClassVar = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int)

    def moved(self, call: OpCall, split: Shard) -> tuple[Shard, Emit | None] | None:
        dims, pieces, unbinds = call.inputs[0].dims, len(call.outputs), call.target is aten.unbind.int
        dim = call.argument(1 if unbinds else 2, "dim", 0) % dims
        even = len({value.shape for value in call.outputs}) == 1
        if dim != split.dim % dims:
            output = split.at(split.dim + (1 if unbinds and split.dim % dims < dim else 0))
        elif call.target is aten.chunk.default and call.argument(1, "chunks") != pieces:
            return None  # of parts it would make another number of pieces
        elif unbinds or not even or split.blocks % pieces:
            return None
        else:
            output = Shard(split.dim, split.sizes, split.blocks // pieces)
        if unbinds or call.target is aten.chunk.default or output == split:  # equal pieces, or another dim
            return output, None
        return output, partial(emit_pieces, split)


def emit_pieces(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    sizes: Any = call.argument(1, "split_size")
    own = split.sizes[emitter.shards.rank]
    if call.target is aten.split.Tensor:
        return emitter.with_args(call, split_size=sizes // split.block_size * own)
    return emitter.with_args(call, split_sizes=[size // split.block_size * own for size in sizes])


@final
class TupleItem(OpRule):
    """One of a tuple."""

    targets: ClassVar = (getitem,)
    redistributes = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        terms: list[Placement] = [PARTIAL] if PARTIAL in available[0] and len(call.inputs) == 1 else []
        for placement in [*shards_among(available[0]), *terms]:
            yield OpStrategy((placement,), (placement,))


register(Reshape(), Transpose(), Unsqueeze(), Expand(), Chunks(), TupleItem())
