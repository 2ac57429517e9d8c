"""Operators that treat each element alone, broadcasting included.

Tensors broadcast against each other, as a loss does it before it compares them.
"""

from collections.abc import Iterator
from typing import ClassVar, final

import torch

from paceline.replica.tensor.base import (
    Available,
    OpCall,
    OpRule,
    OpStrategy,
    functional_overloads,
    register,
    replicated,
    shards_among,
)
from paceline.replica.tensor.placements import PARTIAL, Placement, Shard

aten = torch.ops.aten


def inputs_along(call: OpCall, split: Shard) -> tuple[Placement, ...] | None:
    """How each tensor lies where the result lies so; None: one has another length there.

    A tensor that is broadcast along the dim is everyone's.
    """
    found: list[Placement] = []
    for value in call.inputs:
        length = value.shape[split.dim] if -split.dim <= value.dims else 1
        if length not in (1, split.length):
            return None
        found.append(split if length == split.length else replicated(value))
    return tuple(found)


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


@final
class Elementwise(OpRule):
    """y = f(x, ...) element by element: S_p is whatever part the tensors are divided into."""

    repeats = True
    targets: ClassVar = tuple(functional_overloads(_NAMES))
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        if len(call.outputs) != 1:
            return
        (made,) = call.outputs
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            if -split.dim > made.dims or made.shape[split.dim] != split.length:
                continue
            inputs = inputs_along(call, split)
            if inputs is not None:
                yield OpStrategy(inputs, (split,), share=split.share)
        yield from _of_terms(call, available)


def _of_terms(call: OpCall, available: Available) -> Iterator[OpStrategy]:
    """What a sum of terms may go through before it is summed up: sums, and products with what everyone has."""
    if call.repeats:  # a square of a sum is not the sum of squares
        return
    partial = [PARTIAL in each for each in available]
    if call.target in _SUMS and len(call.inputs) == 2 and all(v.shape == call.outputs[0].shape for v in call.inputs):
        if any(partial):
            yield OpStrategy((PARTIAL, PARTIAL), (PARTIAL,))
    elif call.target in _PRODUCTS and sum(partial) == 1:
        if call.target in _QUOTIENTS and not partial[0]:
            return
        everyone = (PARTIAL if terms else replicated(v) for terms, v in zip(partial, call.inputs, strict=True))
        yield OpStrategy(tuple(everyone), (PARTIAL,))
    elif call.target in _LINEAR and partial[0] and len(call.inputs) == 1:
        yield OpStrategy((PARTIAL,), (PARTIAL,))


_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, *_QUOTIENTS)
_LINEAR = (aten.neg.default, aten.clone.default, aten.contiguous.default, aten.alias.default)

register(Elementwise())


@final
class Broadcast(OpRule):
    """S_p is the same part of all of them; what is broadcast along the divided dim is everyone's."""

    targets: ClassVar = (aten.broadcast_tensors.default,)
    converts = False

    def strategies(self, call: OpCall, available: Available) -> Iterator[OpStrategy]:
        made = call.outputs[0]
        for split in dict.fromkeys(split for each in available for split in shards_among(each)):
            if -split.dim > made.dims or made.shape[split.dim] != split.length:
                continue
            inputs = inputs_along(call, split)
            if inputs is not None and split in inputs:
                yield OpStrategy(inputs, tuple(split for _ in call.outputs), share=split.share)


register(Broadcast())
