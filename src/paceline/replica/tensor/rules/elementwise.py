"""Operators that treat each element alone, broadcasting included."""

from collections.abc import Iterator

from paceline.replica.tensor.base import (
    Available,
    OpCall,
    OpStrategy,
    aten,
    op_rule,
    parameter_shardings,
    shards_among,
)
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

_NAMES = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "alias", "asin", "asinh", "atan", "atan2", "atanh",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max",
    "clamp_min", "clone", "contiguous", "copysign", "cos", "cosh", "deg2rad", "detach", "div", "elu", "eq",
    "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "floor_divide", "fmod", "frac", "full_like", "ge",
    "gelu", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "hypot", "isfinite", "isinf", "isnan",
    "le", "leaky_relu", "lerp", "lift_fresh_copy", "log", "log10", "log1p", "log2", "log_sigmoid", "logaddexp",
    "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill",
    "maximum", "minimum", "mish", "mul", "nan_to_num", "ne", "neg", "ones_like", "positive", "pow", "rad2deg",
    "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign",
    "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "sqrt", "square", "sub", "tan", "tanh",
    "threshold", "to", "_to_copy", "true_divide", "trunc", "type_as", "where", "xlogy", "zeros_like",
)  # fmt: skip


_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, *_QUOTIENTS)
_LINEAR = (aten.neg.default, aten.clone.default, aten.contiguous.default, aten.alias.default)


@op_rule(*_NAMES, redistributes=False, handles_repeats=True)
def elementwise(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """y = f(x, ...) element by element: S_p is whatever part the tensors are sharded into; of weights alone, any."""
    if len(call.outputs) != 1:
        return
    alone = all(value.parameter is not None for value in call.inputs)
    own = (split for value in call.inputs if alone for split in parameter_shardings(call, value))
    for split, inputs in broadcast_shardings(call, [*available, frozenset(own)]):
        yield OpStrategy(inputs, (split,), share=split.share)
    # Terms of a sum may go through sums, and products with what is replicated, before they are summed up.
    if call.repeats_input:  # a square of a sum is not the sum of squares
        return
    partial, shape = [PARTIAL in each for each in available], call.outputs[0].shape
    if call.target in _SUMS and any(partial):
        if len(call.inputs) == 2 and all(value.shape == shape for value in call.inputs):
            yield OpStrategy((PARTIAL, PARTIAL), (PARTIAL,))
    elif call.target in _PRODUCTS and sum(partial) == 1:
        if call.target not in _QUOTIENTS or partial[0]:
            pairs = zip(partial, call.inputs, strict=True)
            yield OpStrategy(tuple(PARTIAL if terms else v.replicated for terms, v in pairs), (PARTIAL,))
    elif call.target in _LINEAR and partial[0] and len(call.inputs) == 1:
        yield OpStrategy((PARTIAL,), (PARTIAL,))


@op_rule(aten.broadcast_tensors.default, redistributes=False)
def broadcast_tensors(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """Tensors broadcast against each other, as a loss does before it compares them: S_p is the same part of all."""
    for split, inputs in broadcast_shardings(call, available):
        if split in inputs:
            yield OpStrategy(inputs, tuple(split for _ in call.outputs), share=split.share)


def broadcast_shardings(call: OpCall, available: Available) -> Iterator[tuple[Shard, tuple[Placement, ...]]]:
    """Yield each sharding that the first result can have, and the placements of the inputs for it."""
    shape = call.outputs[0].shape
    for split in shards_among(*available):
        if -split.dim <= len(shape) and shape[split.dim] == split.length:
            inputs = broadcast_inputs(call, split)
            if inputs is not None:
                yield split, inputs


def broadcast_inputs(call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
    """Return the placement of each input for a result that is sharded so; None: one has another length there.

    A tensor that is broadcast along the dim is replicated.
    """
    placements: list[Placement] = []
    for value in call.inputs:
        length = value.shape[split.dim] if -split.dim <= value.dims else 1
        if length not in (1, split.length):
            return None
        placements.append(split if length == split.length else value.replicated)
    return tuple(placements)
