"""Every collective, by torch.distributed's own functions, on data that all ranks know. Scenes return what was wrong."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from shm_values import Job, bits, combined, counts, numbers, operations, small_stages
from torch import Tensor

from paceline.comm.shm.collectives import rule_of

Outcome = tuple[Tensor, Tensor]
"""What came out, and what should have."""
Move = Callable[[Job, int, torch.dtype], Iterator[Outcome]]
Combine = Callable[[Job, int, torch.dtype, dist.ReduceOp.RedOpType], Iterator[Outcome]]


def moves(rank: int, size: int, dtypes: list[str], elements: list[int] | None = None) -> list[str]:
    """All collectives that only move; without ``elements`` at every bound of small stages."""
    return _with_groups(rank, size, dtypes, elements, _moves)


def combines(rank: int, size: int, dtypes: list[str], elements: list[int] | None = None) -> list[str]:
    """All that combine, by all operations."""
    return _with_groups(rank, size, dtypes, elements, _combines)


def _with_groups(
    rank: int, size: int, dtypes: list[str], elements: list[int] | None, play: Callable[[Job, int, torch.dtype], None]
) -> list[str]:
    kinds = [getattr(torch, name) for name in dtypes]
    if elements is not None:
        job = Job(rank, size)
        for dtype in kinds:
            for count in elements:
                play(job, count, dtype)
        return job.wrong
    with small_stages():
        job = Job(rank, size, dist.new_group())
        for dtype in kinds:
            for count in counts(size, dtype.itemsize):
                play(job, count, dtype)
    return job.wrong


def _moves(job: Job, count: int, dtype: torch.dtype) -> None:
    for move in MOVES:
        for got, expected in move(job, count, dtype):
            job.same(f"{move.__name__} of {count} {dtype}", got, expected)


def _combines(job: Job, count: int, dtype: torch.dtype) -> None:
    for combine in COMBINES:
        for op in operations(dtype):
            for got, expected in combine(job, count, dtype, op):
                job.same(f"{combine.__name__} ({op}) of {count} {dtype}", got, expected)


# ------------------------------------------------------------------------------------------------------------ moves


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """An output, in which what was not written stands out."""
    return torch.full((torch.Size(shape).numel() * dtype.itemsize,), 1, dtype=torch.uint8).view(dtype).view(shape)


def _root(job: Job, count: int) -> int:
    return (count + 1) % job.size


def broadcast(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    x, root = bits(job.rank, count, dtype).clone(), _root(job, count)
    dist.broadcast(x, root, group=job.group)
    yield x, bits(root, count, dtype)


def all_gather(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    outs = [_empty(count, dtype=dtype) for _ in job.ranks]
    dist.all_gather(outs, bits(job.rank, count, dtype), group=job.group)
    for rank, out in enumerate(outs):
        yield out, bits(rank, count, dtype)


def all_gather_uneven(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    outs = [_empty(count + 3 * rank, dtype=dtype) for rank in job.ranks]
    dist.all_gather(outs, bits(job.rank, count + 3 * job.rank, dtype), group=job.group)
    for rank, out in enumerate(outs):
        yield out, bits(rank, count + 3 * rank, dtype)


def all_gather_into_tensor(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    parts = [bits(rank, count, dtype) for rank in job.ranks]
    end_to_end, stacked = _empty(job.size * count, dtype=dtype), _empty(job.size, count, dtype=dtype)
    dist.all_gather_into_tensor(end_to_end, parts[job.rank], group=job.group)
    dist.all_gather_into_tensor(stacked, parts[job.rank], group=job.group)
    yield end_to_end, _joined(parts)
    yield stacked, _joined(parts).view(job.size, count)


def gather(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    root = _root(job, count)
    outs = [_empty(count, dtype=dtype) for _ in job.ranks] if job.rank == root else []
    dist.gather(bits(job.rank, count, dtype), outs or None, root, group=job.group)
    for rank, out in enumerate(outs):
        yield out, bits(rank, count, dtype)


def scatter(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    out, root = _empty(count, dtype=dtype), _root(job, count)
    parts = [bits(rank, count, dtype) for rank in job.ranks] if job.rank == root else None
    dist.scatter(out, parts, root, group=job.group)
    yield out, bits(job.rank, count, dtype)


def _given(source: int, destination: int, size: int, count: int) -> int:
    """How many elements one gives another where all differ; some nothing."""
    return count * ((source + 2 * destination) % size) // size + source % 2


def all_to_all(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    for sizes in (_given, lambda *_: count):  # different ones; the same
        parts = [bits(rank, sizes(job.rank, rank, job.size, count), dtype) for rank in job.ranks]
        outs = [_empty(sizes(rank, job.rank, job.size, count), dtype=dtype) for rank in job.ranks]
        dist.all_to_all(outs, parts, group=job.group)
        for out in outs:
            yield out, bits(job.rank, len(out), dtype)


def all_to_all_single(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    out, parts = _empty(count * job.size, dtype=dtype), [bits(rank, count * job.size, dtype) for rank in job.ranks]
    dist.all_to_all_single(out, parts[job.rank], group=job.group)
    yield out, _joined([part.view(job.size, count)[job.rank] for part in parts])


def all_to_all_single_rows(job: Job, count: int, dtype: torch.dtype) -> Iterator[Outcome]:
    rows = [[_given(source, to, job.size, count // 3) for to in job.ranks] for source in job.ranks]
    giving, taking = rows[job.rank], [row[job.rank] for row in rows]
    given = [bits(rank, sum(rows[rank]) * 3, dtype).view(-1, 3) for rank in job.ranks]
    out = _empty(sum(taking), 3, dtype=dtype)
    dist.all_to_all_single(out, given[job.rank], taking, giving, group=job.group)
    starts = [list(accumulate(row, initial=0))[job.rank] for row in rows]
    yield out, _joined([x[start : start + n] for x, start, n in zip(given, starts, taking, strict=True)])


def _joined(parts: list[Tensor]) -> Tensor:
    """End to end; torch.cat has no float8."""
    dtype, shape = parts[0].dtype, parts[0].shape[1:]
    raw = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    return raw.view(dtype).view(sum(map(len, parts)), *shape)


MOVES: tuple[Move, ...] = (
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_rows,
)

# --------------------------------------------------------------------------------------------------------- combines


def all_reduce(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    parts = [numbers(rank, count, dtype) for rank in job.ranks]
    x = parts[job.rank].clone()
    dist.all_reduce(x, op, group=job.group)
    yield x, combined(parts, op)


def combine(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    """The group's own all-reduce: into another tensor, and in place."""
    parts = [numbers(rank, count, dtype) for rank in job.ranks]
    x, out = parts[job.rank].clone(), _empty(count, dtype=dtype)
    group: Any = job.group or dist.group.WORLD
    for made in (out, x):
        group.combine(x, made, rule_of(op)).wait()
        yield made, combined(parts, op)
        if made is out:
            yield x, parts[job.rank]


def reduce(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    parts, root = [numbers(rank, count, dtype) for rank in job.ranks], _root(job, count)
    x = parts[job.rank].clone()
    dist.reduce(x, root, op, group=job.group)
    yield x, combined(parts, op) if job.rank == root else parts[job.rank]


def reduce_scatter(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    for extra in (0, 2):  # the same for all; more for higher ranks
        sizes = [count + extra * rank for rank in job.ranks]
        parts = [numbers(job.rank, n, dtype).clone() for n in sizes]
        out = _empty(sizes[job.rank], dtype=dtype)
        dist.reduce_scatter(out, parts, op, group=job.group)
        yield out, combined([numbers(rank, sizes[job.rank], dtype) for rank in job.ranks], op)


def reduce_scatter_tensor(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    given, out = [numbers(rank, job.size * count, dtype) for rank in job.ranks], _empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(out, given[job.rank], op, group=job.group)
    yield out, combined([x.view(job.size, count)[job.rank] for x in given], op)


def reduce_scatter_taken(job: Job, count: int, dtype: torch.dtype, op: dist.ReduceOp.RedOpType) -> Iterator[Outcome]:
    """The group's own, a sum that is taken in pieces one after the other."""
    group: Any = job.group or dist.group.WORLD
    for extra in (0, 2) if op == dist.ReduceOp.SUM else ():
        sizes = [count + extra * rank for rank in job.ranks]
        out, ends = _empty(sizes[job.rank], dtype=dtype), [0]

        def taken(start: int, piece: Tensor, out: Tensor = out, ends: list[int] = ends) -> None:
            assert start == ends[-1]
            ends.append(start + piece.numel())
            out[start : ends[-1]] = piece

        group.reduce_scatter_taken([numbers(job.rank, n, dtype).clone() for n in sizes], taken).wait()
        assert ends[-1] == sizes[job.rank]
        yield out, combined([numbers(rank, sizes[job.rank], dtype) for rank in job.ranks], op)


COMBINES: tuple[Combine, ...] = (
    *(all_reduce, combine, reduce),
    *(reduce_scatter, reduce_scatter_taken, reduce_scatter_tensor),
)
