"""How much work an operator is, in multiplications: to tell which of two plans is quicker that send the same."""

from math import prod

import torch

from paceline.replica.tensor.base import Call

aten = torch.ops.aten

_PRODUCTS = (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default, aten.bmm.default)


def work(call: Call) -> float:
    """Of forward alone; backward is in proportion."""
    elements = sum(prod(value.shape) for value in call.gives)
    if call.target in _PRODUCTS:
        index = 1 if call.target is aten.addmm.default else 0
        return float(elements * call.takes[index].shape[-1])
    if "conv" in str(call.target) and len(call.takes) > 1:
        return float(elements * prod(call.takes[1].shape[1:]))
    return float(elements)
