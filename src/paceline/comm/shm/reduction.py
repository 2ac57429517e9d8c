"""Reductions of tensors: elementwise, in ascending rank order, so that all ranks get the same bits."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.shm.calls import Rule
from paceline.core.errors import InputError

_COMBINE: dict[Rule, Callable[..., Tensor]] = {
    Rule.sum: torch.add,
    Rule.avg: torch.add,
    Rule.product: torch.mul,
    Rule.min: torch.minimum,
    Rule.max: torch.maximum,
    Rule.band: torch.bitwise_and,
    Rule.bor: torch.bitwise_or,
    Rule.bxor: torch.bitwise_xor,
}

_RULES = {getattr(ReduceOp, rule.name.upper()): rule for rule in _COMBINE}


def rule_of(op: Any) -> Rule:
    """The rule of a ``torch.distributed.ReduceOp``.

    Raises:
        InputError: it is none of ours.

    >>> rule_of(torch.distributed.ReduceOp.SUM).name
    'sum'
    """
    kind = getattr(op, "op", op)
    rule = _RULES.get(kind)
    if rule is None:
        raise InputError(
            f"reduce operation {kind.name} is not known to backend shm; write one of "
            f"{', '.join(rule.name.upper() for rule in _COMBINE)}"
        )
    return rule


@cache
def check(rule: Rule, dtype: torch.dtype) -> None:
    """Raise InputError where elements of a dtype can't be combined by a rule."""
    try:
        probe = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        _COMBINE[rule](probe, probe, out=probe)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error)
    else:
        if rule is not Rule.avg or dtype.is_floating_point or dtype.is_complex:
            return
        reason = "a mean of whole numbers is none"
    raise InputError(
        f"{rule.name} of {str(dtype).removeprefix('torch.')} can't be had ({reason}); convert the tensor first, as by "
        "x.float()"
    )


def reduce(parts: Sequence[Tensor], rule: Rule, out: Tensor) -> None:
    """``out`` = the parts, combined from the first to the last; it may be one of the first two."""
    combine = _COMBINE[rule]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if rule is Rule.avg:
        out.div_(len(parts))
