"""What each rank of a test holds, known to all ranks, and the comparison of what came of it, bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.shm import collectives, p2p, region, rendezvous

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMBINED = (torch.bool, *WHOLE, *FLOATS)
"""torch can add and compare these on the CPU, and torch.distributed takes them for every operation."""
MOVED = (*COMBINED, *COMPLEX, *UNSIGNED, *EIGHTS)

SMALL_BYTES = region.PAGE
"""A stage of the least size, so that little data already takes many rounds."""


@lru_cache(maxsize=512)
def bits(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all, not a number among them; never to be written."""
    generator = torch.Generator().manual_seed(rank * 7919 + count)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


@lru_cache(maxsize=512)
def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What can be added, multiplied and compared; never to be written."""
    generator = torch.Generator().manual_seed(rank * 7919 + count + 1)
    if dtype.is_floating_point:
        return torch.randn(count, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def operations(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    """All that elements of a dtype can be combined by."""
    whole = not dtype.is_floating_point
    return [op for op in COMBINE if not (whole and op == dist.ReduceOp.AVG)] + (list(BITWISE) if whole else [])


def combined(parts: list[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    """The oracle: in the order of ranks, so floating-point results are equal in every bit."""
    whole = reduce((COMBINE | BITWISE)[op], parts[1:], parts[0].clone())
    return whole / len(parts) if op == dist.ReduceOp.AVG else whole


@dataclass
class Job:
    """A rank's place in a group, and what it found wrong."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    wrong: list[str] = field(default_factory=list[str])

    @property
    def ranks(self) -> range:
        """All of the group."""
        return range(self.size)

    def same(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Note where a tensor is not what it should be in shape, dtype or any bit."""
        if got.dtype != expected.dtype or got.shape != expected.shape or not torch.equal(_raw(got), _raw(expected)):
            self.wrong.append(f"{what}: {_shown(got)} should be {_shown(expected)}")

    def equal(self, what: str, got: object, expected: object) -> None:
        """Note where something else is not what it should be."""
        if got != expected:
            self.wrong.append(f"{what}: {got!r} should be {expected!r}")


@contextmanager
def small_stages() -> Iterator[None]:
    """Groups made herein show little at a time; they must be used herein too."""
    with (
        patch.object(rendezvous, "STAGE_BYTES", SMALL_BYTES),
        patch.object(collectives, "AT_ONCE_BYTES", SMALL_BYTES // 4),
        patch.object(collectives, "BROADCAST_BYTES", 2 * SMALL_BYTES),
        patch.object(region, "PIECE_BYTES", SMALL_BYTES // 8),
        patch.object(p2p, "PIECE_BYTES", SMALL_BYTES // 8),
    ):
        yield


def counts(size: int, item_bytes: int) -> list[int]:
    """Elements around every bound at which small stages are met otherwise."""
    stage = SMALL_BYTES // item_bytes
    bounds = (stage // 4 // size, stage // size * size, stage, 2 * stage, size * stage)
    return sorted({0, 1, 7, *(bound + extra for bound in bounds for extra in (-1, 0, 1))})


def _raw(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _shown(x: Tensor) -> str:
    start = x.detach().reshape(-1)[:4]
    return f"{tuple(x.shape)} {x.dtype} {start.tolist() if x.dtype not in EIGHTS else start.float().tolist()}"
