"""What a rank calls, as 64 bytes that all ranks compare before any of them touches a result."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from paceline.comm.shm.layout import LINE

_PACKED = struct.Struct("<4q2q")
_DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
"""All of them, aliases among them; every rank runs the same torch."""

_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

NOBODY = -1
UNEVEN = -1


class Kind(IntEnum):
    """Which collective."""

    barrier = 1
    broadcast = 2
    all_reduce = 3
    reduce = 4
    all_gather = 5
    gather = 6
    scatter = 7
    reduce_scatter = 8
    all_to_all = 9


class Rule(IntEnum):
    """How elements are combined."""

    nothing = 0
    sum = 1
    avg = 2
    product = 3
    min = 4
    max = 5
    band = 6
    bor = 7
    bxor = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as far as it must be the same on all ranks.

    Args:
        kind: which.
        dtype: of its tensors; None: a barrier has none.
        elements: of this rank's tensor; ``UNEVEN`` where ranks may differ, and compare in another way.
        root: rank in the group, or ``NOBODY``.
        rule: of a reduction.
        sizes: of several parts, where they must be the same on all ranks.

    >>> call = Call(Kind.all_reduce, torch.float32, 10, rule=Rule.sum)
    >>> Call.unpacked(call.packed()) == call, str(call)
    (True, 'all_reduce(sum) of 10 float32')
    """

    kind: Kind
    dtype: torch.dtype | None = None
    elements: int = 0
    root: int = NOBODY
    rule: Rule = Rule.nothing
    sizes_sum: int = 0

    def packed(self) -> bytes:
        """One line."""
        fields = (self.kind, dtype_code(self.dtype), self.elements, self.root, self.rule, self.sizes_sum)
        return _PACKED.pack(*fields).ljust(LINE, b"\0")

    @classmethod
    def unpacked(cls, line: bytes) -> "Call":
        """What a line says."""
        kind, code, elements, root, rule, sizes_sum = _PACKED.unpack_from(line)
        return cls(Kind(kind), dtype_of(code) if code >= 0 else None, elements, root, Rule(rule), sizes_sum)

    def __str__(self) -> str:
        rule = f"({self.rule.name})" if self.rule else ""
        where = f" with root {self.root}" if self.root != NOBODY else ""
        if self.dtype is None:
            return f"{self.kind.name}{where}"
        count = "" if self.elements == UNEVEN else f"{self.elements:,} "
        parts = f" in parts (checksum {self.sizes_sum:08x})" if self.sizes_sum else ""
        return f"{self.kind.name}{rule}{where} of {count}{str(self.dtype).removeprefix('torch.')}{parts}"


def dtype_code(dtype: torch.dtype | None) -> int:
    """A number for it, the same on every rank."""
    return -1 if dtype is None else _CODES[dtype]


def dtype_of(code: int) -> torch.dtype:
    """The dtype of a number."""
    return _DTYPES[code]


def checksum(sizes: Sequence[int]) -> int:
    """Of the sizes of parts, so that ranks which cut differently notice."""
    return zlib.crc32(struct.pack(f"<{len(sizes)}q", *sizes))
