"""Arguments of collectives as contiguous vectors, and reductions of them in ascending rank order.

Reductions of tensors: elementwise, in ascending rank order, so that all ranks get the same bits.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.shm.region import OTHERWISE
from paceline.comm.shm.staging import ReduceRule, Steps
from paceline.core.errors import InputError


def vector(x: Tensor) -> Tensor:
    """All elements in one dimension; the tensor's own memory where that is contiguous.

    Raises:
        InputError: it does not lie in this host's memory, densely.
    """
    if not x.is_cpu:
        raise InputError(f"backend shm carries CPU tensors, and this one is on {x.device}; {OTHERWISE}")
    if x.layout is not torch.strided or x.is_quantized:
        raise InputError(f"backend shm carries dense tensors, and this one is {x.layout}; write x.to_dense()")
    v = x.data  # the version of a tensor that autograd has seen must not change, as with all other backends
    if not plain(v):
        v = v.contiguous().resolve_conj().resolve_neg()
    return v if v.dim() == 1 else v.view(-1)


def plain(x: Tensor) -> bool:
    """Whether its vector is its own memory."""
    return x.is_contiguous() and not (x.is_conj() or x.is_neg())


def returned(steps: Steps, tensors: Sequence[Tensor], vectors: Sequence[Tensor]) -> Steps:
    """The same steps, after which what was written into copies is written into the tensors."""
    return steps if all(map(plain, tensors)) else _written_back(steps, zip(tensors, vectors, strict=True))


def _written_back(steps: Steps, pairs: Iterable[tuple[Tensor, Tensor]]) -> Steps:
    yield from steps
    for x, v in pairs:
        if not plain(x):
            x.data.copy_(v.view(x.shape))


def raw(v: Tensor) -> Tensor:
    """A contiguous vector's bytes."""
    return v.view(torch.uint8)


def one(tensors: Sequence[Tensor], what: str) -> Tensor:
    """The only tensor of a list; raises InputError where there are more."""
    if len(tensors) != 1:
        raise InputError(f"{what} takes one tensor, and was given {len(tensors)}; make one call for each")
    return tensors[0]


def same_dtype(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise InputError where a rank's own tensors differ."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1:
        raise InputError(f"{what}: tensors of one dtype are needed, not {', '.join(sorted(map(str, dtypes)))}")


def cut(whole: Tensor, parts: int, what: str, sizes: Sequence[int] | None = None, rows: int = 0) -> list[Tensor]:
    """A vector in so many parts, equal ones or of so many rows each.

    Raises:
        InputError: it can't be cut so.
    """
    if not sizes:
        if whole.numel() % parts:
            raise InputError(
                f"{what}: {whole.numel():,} elements can't be cut into {parts} equal parts; pad the tensor"
            )
        return list(whole.view(parts, whole.numel() // parts).unbind())
    if len(sizes) != parts or sum(sizes) != rows:
        raise InputError(f"{what}: sizes {list(sizes)} must be {parts}, one a rank, and add up to the {rows} rows")
    row = whole.numel() // rows if rows else 0
    ends = list(accumulate((size * row for size in sizes), initial=0))
    return [whole[start:end] for start, end in pairwise(ends)]


_COMBINE: dict[ReduceRule, Callable[..., Tensor]] = {
    ReduceRule.sum: torch.add,
    ReduceRule.avg: torch.add,
    ReduceRule.product: torch.mul,
    ReduceRule.min: torch.minimum,
    ReduceRule.max: torch.maximum,
    ReduceRule.band: torch.bitwise_and,
    ReduceRule.bor: torch.bitwise_or,
    ReduceRule.bxor: torch.bitwise_xor,
}

_RULES = {getattr(ReduceOp, rule.name.upper()): rule for rule in _COMBINE}


def rule_of(op: Any) -> ReduceRule:
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
def check(rule: ReduceRule, dtype: torch.dtype) -> None:
    """Raise InputError where elements of a dtype can't be combined by a rule."""
    try:
        probe = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        _COMBINE[rule](probe, probe, out=probe)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error)
    else:
        if rule is not ReduceRule.avg or dtype.is_floating_point or dtype.is_complex:
            return
        reason = "a mean of whole numbers is none"
    raise InputError(
        f"{rule.name} of {str(dtype).removeprefix('torch.')} can't be had ({reason}); convert the tensor first, as by "
        "x.float()"
    )


def reduce(parts: Sequence[Tensor], rule: ReduceRule, out: Tensor) -> None:
    """``out`` = the parts, combined from the first to the last; it may be one of the first two."""
    combine = _COMBINE[rule]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if rule is ReduceRule.avg:
        out.div_(len(parts))
