"""Linear layers: x·Wᵀ + b, and x·W + b as GPT-2 writes it."""

from collections.abc import Iterable, Iterator

from torch.fx import Node

from paceline.replica.tensor.base import Available, GraphEmitter, OpCall, OpStrategy, aten, op_rule, shards_among
from paceline.replica.tensor.placements import PARTIAL, PARTIAL_GRAD, OnRank, Placement, Shard

# Placement of a bias that is added once, by shard 0.
BIAS_RANK = OnRank(0)


@op_rule(aten.linear.default)
def linear(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = x·Wᵀ + b, with W of m × n.

    column: S_p = rows of W and elements of b; x is replicated, and y_p is a part of y.
    row: S_p = columns of W; x_p is a part of x, and y is the sum of all x_p·W_pᵀ, to which shard 0 adds b.
    samples: S_p = everything; x_p are some of the rows of x, and so is y_p.
    """
    _, weight, *bias = call.inputs
    for rows in dim_shardings(call, available[1], weight.shape[0], -2):
        part = rows.at(-1)
        yield OpStrategy((PARTIAL_GRAD, rows, *(part for _ in bias)), (part,), "column", share=part.share)
    if can_be_summed(call, 2):
        for columns in dim_shardings(call, [*available[0], *available[1]], weight.shape[1]):
            inputs: tuple[Placement, ...] = (columns, columns, *(BIAS_RANK for _ in bias))
            yield OpStrategy(inputs, (PARTIAL,), "row", emit_bias_once, columns.share)
    for split in shards_among(available[0]):
        if split.dim < -1:
            inputs = (split, PARTIAL_GRAD, *(PARTIAL_GRAD for _ in bias))
            yield OpStrategy(inputs, (split,), "samples", share=split.share)


@op_rule(aten.addmm.default)
def addmm(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = b + x·W, with W of n × m: S_p as of :func:`linear`, with rows and columns of W exchanged."""
    bias, _, weight = call.inputs
    if bias.dims != 1 or any(call.argument(i, name, 1) != 1 for i, name in ((3, "beta"), (4, "alpha"))):
        return
    for columns in call.shardings(weight.shape[1], -1):
        yield OpStrategy((columns, PARTIAL_GRAD, columns), (columns,), "column", share=columns.share)
    if can_be_summed(call, 0):
        for columns in dim_shardings(call, available[1], weight.shape[0]):
            inputs = (BIAS_RANK, columns, columns.at(-2))
            yield OpStrategy(inputs, (PARTIAL,), "row", emit_addmm_row, columns.share)
    for split in shards_among(available[1]):
        if split.dim < -1:
            yield OpStrategy((PARTIAL_GRAD, split, PARTIAL_GRAD), (split,), "samples", share=split.share)


def can_be_summed(call: OpCall, bias: int) -> bool:
    """Return True if all shards' terms have a gradient, or none.

    It is False where only the bias has one: shard 0 alone would communicate.

    Args:
        call: an operator with a bias.
        bias: index of the bias among its inputs.
    """
    others = (value.differentiable for place, value in enumerate(call.inputs) if place != bias)
    return any(others) or not any(value.differentiable for value in call.inputs)


def dim_shardings(call: OpCall, available: Iterable[Placement], length: int, dim: int = -1) -> Iterator[Shard]:
    """Yield the shardings of a dim: even ones, and those that a tensor has already, say in blocks."""
    present = (split for split in shards_among(available) if split.dim == dim and split.length == length)
    yield from dict.fromkeys((*call.shardings(length, dim), *present))


def emit_bias_once(emitter: GraphEmitter, call: OpCall) -> Node:
    """Emit an operator whose results are terms of a sum, the bias on shard 0 alone."""
    return emitter.with_args(call) if emitter.shards.rank == BIAS_RANK.shard else emitter.with_args(call, bias=None)


def emit_addmm_row(emitter: GraphEmitter, call: OpCall) -> Node:
    if emitter.shards.rank == BIAS_RANK.shard:
        return emitter.with_args(call)
    _, x, weight = call.inputs
    return emitter.graph.call_function(aten.mm.default, (emitter.local(x.node), emitter.local(weight.node)))
