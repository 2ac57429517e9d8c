"""Embeddings: rows of a table."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor
from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, REPLICATE, Shard


@op_rule(aten.embedding.default)
def embedding(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = W[i], with W of n × d.

    column: S_p = columns of W; y_p is a part of y along its last dim.
    row: S_p = rows of W; a shard looks up those that it has and gives zeros for others, and y is the sum.
    samples: S_p = everything; i_p is a part of i.
    """
    weight = call.inputs[0]
    if call.argument(3, "scale_grad_by_freq", False):  # a shard would have to count for all
        return
    for columns in call.shardings(weight.shape[1], -1):
        yield OpStrategy((columns, REPLICATE), (columns,), "column", share=columns.share)
    for rows in call.shardings(weight.shape[0], -2):
        if rows.blocks == 1:
            yield OpStrategy((rows, REPLICATE), (PARTIAL,), "row", partial(emit_rows, rows), share=rows.share)
    for split in shards_among(available[-1]):
        inputs = (PARTIAL_GRAD, split)
        yield OpStrategy(inputs, (split.at(split.dim - 1),), "samples", share=split.share)


def emit_rows(split: Shard, emitter: GraphEmitter, call: OpCall) -> Node:
    rank, padding = emitter.shards.rank, call.argument(2, "padding_idx", -1)
    weight, indices = (emitter.local(value.node) for value in call.inputs)
    args = (weight, indices, padding, split.offsets[rank], split.sizes[rank])
    return emitter.graph.call_function(embedding_rows, args)


def embedding_rows(weight: Tensor, indices: Tensor, padding: int, start: int, count: int) -> Tensor:
    """Look up the rows that a shard has, ``count`` from ``start`` on, with zeros for others."""
    local = indices - start
    present = (local >= 0) & (local < count)
    padding = padding - start if 0 <= padding - start < count else -1
    # Rows of other shards are looked up as row 0 and zeroed below.
    rows = aten.embedding.default(weight, local.where(present, local.new_zeros(())), padding)
    return rows * present.unsqueeze(-1)  # type: ignore[no-any-return]
