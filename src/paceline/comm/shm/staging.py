"""Rounds of a collective: every rank shows its fingerprint and its data in a stage before any rank goes on.

::

    rank 0   write  post 1 .......... read | write  post 2 . read |
    rank 1   write ........... post 1 read | write ... post 2 read |
             stages of odd rounds            stages of even rounds

A rank that posts round n + 1 has read all of round n. So when all have posted n + 1, the stages of round n may be
written again: two stages and one counter for each rank are enough.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.shm.region import LINE, Region
from paceline.comm.wakeup import FENCED, fence
from paceline.core.errors import CollectiveError, InputError

_PACKED = struct.Struct("<4q2q")

DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
"""All dtypes, aliases among them; their order is the same on every rank, which all run the same torch."""

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

NO_ROOT = -1
UNEVEN = -1


class CollectiveKind(IntEnum):
    barrier = 1
    broadcast = 2
    all_reduce = 3
    reduce = 4
    all_gather = 5
    gather = 6
    scatter = 7
    reduce_scatter = 8
    all_to_all = 9


class ReduceRule(IntEnum):
    """How elements are reduced."""

    nothing = 0
    sum = 1
    avg = 2
    product = 3
    min = 4
    max = 5
    band = 6
    bor = 7
    bxor = 8


_REDUCE: dict[ReduceRule, Callable[..., Tensor]] = {
    ReduceRule.sum: torch.add,
    ReduceRule.avg: torch.add,
    ReduceRule.product: torch.mul,
    ReduceRule.min: torch.minimum,
    ReduceRule.max: torch.maximum,
    ReduceRule.band: torch.bitwise_and,
    ReduceRule.bor: torch.bitwise_or,
    ReduceRule.bxor: torch.bitwise_xor,
}

_RULES = {getattr(ReduceOp, rule.name.upper()): rule for rule in _REDUCE}


def rule_of(op: Any) -> ReduceRule:
    """Return the rule of a ``torch.distributed.ReduceOp``.

    Raises:
        InputError: backend shm has no such rule.

    >>> rule_of(torch.distributed.ReduceOp.SUM).name
    'sum'
    """
    kind = getattr(op, "op", op)
    rule = _RULES.get(kind)
    if rule is None:
        raise InputError(
            f"reduce operation {kind.name} is not known to backend shm; write one of "
            f"{', '.join(rule.name.upper() for rule in _REDUCE)}"
        )
    return rule


@cache
def check_rule(rule: ReduceRule, dtype: torch.dtype) -> None:
    """Raise InputError if elements of a dtype can't be reduced by a rule."""
    try:
        probe = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        _REDUCE[rule](probe, probe, out=probe)
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
    """Reduce the parts, elementwise, into ``out``, which may be one of the first two."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    # In ascending order of ranks, whichever rank does it: sums of floats then have the same bits on all of them.
    combine = _REDUCE[rule]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if rule is ReduceRule.avg:
        out.div_(len(parts))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Arguments of a collective that must be the same on all ranks.

    Args:
        kind: of collective.
        dtype: of its tensors; None: a barrier has none.
        elements: of this rank's tensor; ``UNEVEN`` if ranks may differ, and are compared in another way.
        root: rank in the group, or ``NO_ROOT``.
        rule: of a reduction.
        sizes_sum: checksum of the sizes of several parts, if they must be the same on all ranks.

    >>> fingerprint = Fingerprint(CollectiveKind.all_reduce, torch.float32, 10, rule=ReduceRule.sum)
    >>> Fingerprint.unpacked(fingerprint.packed()) == fingerprint, str(fingerprint)
    (True, 'all_reduce(sum) of 10 float32')
    """

    kind: CollectiveKind
    dtype: torch.dtype | None = None
    elements: int = 0
    root: int = NO_ROOT
    rule: ReduceRule = ReduceRule.nothing
    sizes_sum: int = 0

    def packed(self) -> bytes:
        """Return it as one cache line."""
        code = -1 if self.dtype is None else DTYPE_CODES[self.dtype]
        fields = (self.kind, code, self.elements, self.root, self.rule, self.sizes_sum)
        return _PACKED.pack(*fields).ljust(LINE, b"\0")

    @classmethod
    def unpacked(cls, line: bytes) -> "Fingerprint":
        kind, code, elements, root, rule, sizes_sum = _PACKED.unpack_from(line)
        dtype = DTYPES[code] if code >= 0 else None
        return cls(CollectiveKind(kind), dtype, elements, root, ReduceRule(rule), sizes_sum)

    def __str__(self) -> str:
        rule = f"({self.rule.name})" if self.rule else ""
        root = f" with root {self.root}" if self.root != NO_ROOT else ""
        if self.dtype is None:
            return f"{self.kind.name}{root}"
        count = "" if self.elements == UNEVEN else f"{self.elements:,} "
        parts = f" in parts (checksum {self.sizes_sum:08x})" if self.sizes_sum else ""
        return f"{self.kind.name}{rule}{root} of {count}{str(self.dtype).removeprefix('torch.')}{parts}"


def checksum(sizes: Sequence[int]) -> int:
    """Return a checksum of the sizes of parts, so that ranks which cut differently notice."""
    return zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes))


Steps: TypeAlias = Iterator[Callable[[], bool]]
"""A collective in steps: between two of them it waits until the function that it has yielded returns True."""

MAX_FRONTS = 1024
"""Views that are kept for the next collective of the same size: creating them takes as long as a small sum."""

_packed = lru_cache(maxsize=4096)(Fingerprint.packed)


class StagedRounds:
    """The rounds of one group, as one rank makes them. Between two posts all methods mean the round being written."""

    def __init__(self, region: Region) -> None:
        self.region, self.rank, self.size = region, region.rank, region.size
        layout, header_bytes = region.layout, region.size * LINE
        self._posted = region.words(layout.posted, region.size * LINE // 8)[:: LINE // 8]
        self._headers = [region.bytes(layout.headers + parity * header_bytes, header_bytes) for parity in (0, 1)]
        self._own_headers = [h[self.rank * LINE : (self.rank + 1) * LINE] for h in self._headers]
        words = region.size * 2 * region.size
        self._sizes = [region.words(layout.sizes + parity * words * 8, words) for parity in (0, 1)]
        self._stages: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._fronts: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._joint: dict[tuple[int, torch.dtype], Tensor] = {}
        self._number = 0
        self.stage_bytes = layout.stage_bytes

    def stages(self, dtype: torch.dtype) -> list[Tensor]:
        """Return all ranks' stages as vectors."""
        key = ((self._number + 1) & 1, dtype)
        stages = self._stages.get(key)
        if stages is None:
            layout = self.region.layout
            stages = self._stages[key] = [
                self.region.tensor(layout.stage(key[0], rank), layout.stage_bytes, dtype) for rank in range(self.size)
            ]
        return stages

    def fronts(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return the first elements of all ranks' stages."""
        key = ((self._number + 1) & 1, dtype, count)
        fronts = self._fronts.get(key)
        if fronts is None:
            if len(self._fronts) == MAX_FRONTS:
                self._fronts.clear()
            fronts = self._fronts[key] = [stage[:count] for stage in self.stages(dtype)]
        return fronts

    def joint(self, dtype: torch.dtype) -> Tensor:
        """Return all stages as one vector, for a collective in which one rank alone shows something."""
        key = ((self._number + 1) & 1, dtype)
        joint = self._joint.get(key)
        if joint is None:
            layout = self.region.layout
            joint = self._joint[key] = self.region.tensor(
                layout.stage(key[0], 0), layout.stage_bytes * self.size, dtype
            )
        return joint

    def sizes(self) -> "memoryview[int]":
        """Return, rank after rank, the elements that it has for each rank, and then that it expects of each."""
        return self._sizes[(self._number + 1) & 1]

    def show(self, fingerprint: Fingerprint) -> None:
        """Write the fingerprint of this rank's collective."""
        self._own_headers[(self._number + 1) & 1][:] = _packed(fingerprint)

    def post(self) -> None:
        """End the writing of this round, and wake the ranks that sleep until it has been posted."""
        # The data before the counter: x86 keeps the order of stores, other processors need a fence.
        if not FENCED:
            fence()
        self._number = number = self._number + 1
        self._posted[self.rank] = number
        self.region.wake_all()

    def all_posted(self) -> bool:
        """Return whether all ranks have posted the round that this rank has posted last."""
        return min(self._posted) >= self._number

    def missing(self) -> list[int]:
        """Return the ranks that have not posted it."""
        return [rank for rank, number in enumerate(self._posted) if number < self._number]

    def check(self, fingerprint: Fingerprint) -> None:
        """Raise CollectiveError, on every rank alike, if ranks call different collectives."""
        headers = bytes(self._headers[self._number & 1])
        if headers == _packed(fingerprint) * self.size:
            return
        callers: dict[str, list[int]] = {}
        for rank in range(self.size):
            line = headers[rank * LINE : (rank + 1) * LINE]
            callers.setdefault(str(Fingerprint.unpacked(line)), []).append(rank)
        calls = "; ".join(f"{self.region.named(ranks)}: {call}" for call, ranks in callers.items())
        raise CollectiveError(
            f"ranks of group {self.region.name} call different things: {calls}; make the same call on all of them"
        )
