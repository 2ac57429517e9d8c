"""Operators that move elements without changing them."""

from collections.abc import Iterator, Sequence
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
    replicated,
    shards_among,
)
from paceline.replica.tensor.graph_ops import matching_dims
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


class _Moves(OpRule):
    """S_p is the part of the tensor that was divided, wherever it goes; a sum of terms stays one."""

    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        for split in shards_among(available[0]):
            outputs = self.moved(call, split)
            if outputs is not None:
                yield OpStrategy((split,), outputs, emit=self.written(call, split, outputs[0]), share=split.share)
        if PARTIAL in available[0]:
            yield OpStrategy((PARTIAL, *map(replicated, call.inputs[1:])), tuple(PARTIAL for _ in call.outputs))

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        """How the results lie where the tensor lies so; None: nobody could say."""
        raise NotImplementedError

    def written(self, call: OpCall, split: Shard, made: Placement) -> Emit | None:
        """None: as it is; ``made`` is how the first result lies."""
        del call, split, made
        return None


def reshaped(split: Shard, before: Sequence[int], after: Sequence[int]) -> Shard | None:
    """Where a split goes when a tensor is given another shape; None: parts would no longer be parts of one dim.

    >>> reshaped(Shard(-1, (8, 8), blocks=3), (5, 48), (5, 3, 2, 8))
    Shard(dim=-2, sizes=(1, 1), blocks=1)
    >>> reshaped(Shard(-3, (1, 1)), (5, 2, 7, 8), (10, 7, 8))
    Shard(dim=-3, sizes=(1, 1), blocks=5)
    """
    where = split.dim % len(before)
    for ours, theirs in matching_dims(before, after):
        if where not in theirs:
            continue
        place = theirs.index(where)
        blocks = split.blocks * prod(before[i] for i in theirs[:place])
        inner = prod(before[i] for i in theirs[place + 1 :])
        sizes = tuple(size * inner for size in split.sizes)
        return _apart(blocks, sizes, ours, after)
    return None


def _apart(blocks: int, sizes: tuple[int, ...], dims: Sequence[int], shape: Sequence[int]) -> Shard | None:
    """The dim, of those that stand for one, along which the parts lie."""
    for place, dim in enumerate(dims):
        slower, quicker = prod(shape[i] for i in dims[:place]), prod(shape[i] for i in dims[place + 1 :])
        if blocks % slower or any(size % quicker for size in sizes):
            continue
        split = Shard(dim - len(shape), tuple(size // quicker for size in sizes), blocks // slower)
        if split.length == shape[dim]:
            return split
    return None


@final
class Reshape(_Moves):
    """The same elements in another shape: parts stay parts where the dim is made of whole ones, or into whole ones."""

    targets: ClassVar = (
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int
    )  # fmt: skip

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        made = reshaped(split, call.inputs[0].shape, call.outputs[0].shape)
        return None if made is None else (made,)

    def written(self, call: OpCall, split: Shard, made: Placement) -> Emit | None:
        assert isinstance(made, Shard), f"what is divided as {split} stays divided"
        if call.target is aten.flatten.using_ints:
            return None
        if call.target is aten.unflatten.int:
            return lambda emitter, call: emitter.same(call, sizes=_unflat(emitter, call, made))
        name = call.target._schema.arguments[1].name
        return lambda emitter, call: emitter.same(call, **{name: local_sizes(emitter, call.argument(1, name), made)})


def local_sizes(emitter: GraphEmitter, sizes: Any, split: Shard) -> list[Any]:
    """A shape as an operator is told it, of which one dim is a shard's part."""
    mine, block, made = split.sizes[emitter.shards.rank], split.block_size, [_new(emitter, size) for size in sizes]
    size = made[split.dim]
    if isinstance(size, int):
        made[split.dim] = size if size == -1 else size // block * mine
    else:
        made[split.dim] = emitter.call(mul, emitter.call(floordiv, size, block), mine)
    return made


def _unflat(emitter: GraphEmitter, call: OpCall, split: Shard) -> list[Any]:
    dim, sizes = call.argument(1, "dim") % call.inputs[0].dims, call.argument(2, "sizes")
    place = split.dim % call.outputs[0].dims - dim
    if not 0 <= place < len(sizes):
        return list(sizes)
    return local_sizes(emitter, sizes, split.at(place - len(sizes)))


def _new(emitter: GraphEmitter, size: Any) -> Any:
    return emitter.local(size) if isinstance(size, Node) else size


@final
class Transpose(_Moves):
    """Dims in another order."""

    targets: ClassVar = (aten.transpose.int, aten.permute.default, aten.t.default, aten.movedim.int)

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        dims = call.inputs[0].dims
        probe = torch.empty([1] * dims)
        probe = probe.as_strided([1] * dims, list(range(1, dims + 1)))  # strides name the dims
        moved = call.target(probe, *call.node.args[1:])
        return (split.at(moved.stride().index(split.dim % dims + 1) - dims),)


@final
class Unsqueeze(_Moves):
    """A dim of one element more, or less."""

    targets: ClassVar = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        asked = call.argument(1, "dim")
        dims = {dim % call.inputs[0].dims for dim in (asked if isinstance(asked, (list, tuple)) else [asked])}
        if call.target is not aten.unsqueeze.default and split.dim % call.inputs[0].dims in dims:
            return None  # a part may be one element long where the whole is not
        made = reshaped(split, call.inputs[0].shape, call.outputs[0].shape)
        return None if made is None or made.length != split.length else (made,)


@final
class Expand(_Moves):
    """Dims of one element, repeated."""

    targets: ClassVar = (aten.expand.default, aten.expand_as.default)

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        if call.target is not aten.expand.default or call.outputs[0].shape[split.dim] != split.length:
            return None
        return (split,)

    def written(self, call: OpCall, split: Shard, made: Placement) -> Emit | None:
        sizes = call.argument(1, "size")
        assert made == split, "it stays where it is"
        return lambda emitter, call: emitter.same(call, size=local_sizes(emitter, sizes, split))


@final
class Chunks(_Moves):
    """Pieces of one dim, as a tuple: of the same length each, where it is the one that was divided."""

    targets: ClassVar = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.unbind.int)

    def moved(self, call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
        dims, pieces = call.inputs[0].dims, len(call.outputs)
        dim = (call.argument(2 if call.target not in _OF_DIM else 1, "dim", 0)) % dims
        if dim != split.dim % dims:
            shift = 1 if call.target is aten.unbind.int and split.dim % dims < dim else 0
            return tuple(split.at(split.dim + shift) for _ in call.outputs)
        alike = len({value.shape for value in call.outputs}) == 1
        if call.target is aten.chunk.default and call.argument(1, "chunks") != pieces:
            return None  # of parts it would make another number of pieces
        if call.target is aten.unbind.int or not alike or split.blocks % pieces:
            return None
        return tuple(Shard(split.dim, split.sizes, split.blocks // pieces) for _ in call.outputs)

    def written(self, call: OpCall, split: Shard, made: Placement) -> Emit | None:
        if call.target in (*_OF_DIM, aten.chunk.default) or made == split:  # along another dim, or in equal pieces
            return None
        sizes: Any = call.argument(1, "split_size")
        if call.target is aten.split.Tensor:
            return lambda emitter, call: emitter.same(call, split_size=_mine(emitter, sizes, split))
        return lambda emitter, call: emitter.same(call, split_sizes=[_mine(emitter, size, split) for size in sizes])


_OF_DIM = (aten.unbind.int,)


def _mine(emitter: GraphEmitter, size: int, split: Shard) -> int:
    return size // split.block_size * split.sizes[emitter.shards.rank]


@final
class Element(OpRule):
    """One of a tuple."""

    targets: ClassVar = (getitem,)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        terms: list[Placement] = [PARTIAL] if PARTIAL in available[0] and len(call.inputs) == 1 else []
        for layout in [*shards_among(available[0]), *terms]:
            yield OpStrategy((layout,), (layout,))


for _rule in (Reshape(), Transpose(), Unsqueeze(), Expand(), Chunks(), Element()):
    register(_rule)
