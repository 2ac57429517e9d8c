"""Tensors that are not simply a vector: strided, transposed, 0-d, conjugate, sparse, leafs of autograd."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from shm_values import SMALL_BYTES, Job, combined, small_stages
from torch import Tensor

LENGTH = SMALL_BYTES // 4 + 3
"""Of the longest dimension: more than a stage of float32."""


def layouts(rank: int, size: int) -> list[str]:
    """Each collective on each layout; what was wrong."""
    with small_stages():
        job = Job(rank, size, dist.new_group())
        for make in LAYOUTS:
            for collective in COLLECTIVES:
                collective(job, make)
    return job.wrong


def _strided(seed: int) -> Tensor:
    return _random(seed, 2 * LENGTH)[::2]


def _transposed(seed: int) -> Tensor:
    return _random(seed, 3, LENGTH).t()


def _offset(seed: int) -> Tensor:
    return _random(seed, LENGTH + 5)[5:]


def _channels_last(seed: int) -> Tensor:
    return _random(seed, 2, 3, 5, 7).contiguous(memory_format=torch.channels_last)


def _scalar(seed: int) -> Tensor:
    return _random(seed)


def _empty(seed: int) -> Tensor:
    return _random(seed, 3, 0, 2)


def _leaf(seed: int) -> Tensor:
    return _random(seed, LENGTH, 2).requires_grad_()


def _parameter(seed: int) -> Tensor:
    return torch.nn.Parameter(_random(seed, LENGTH).view(-1, 1).t())


def _negative(seed: int) -> Tensor:
    return torch.view_as_complex(_random(seed, LENGTH, 2)).conj().imag


LAYOUTS: tuple[Callable[[int], Tensor], ...] = (
    _strided,
    _transposed,
    _offset,
    _channels_last,
    _scalar,
    _empty,
    _leaf,
    _parameter,
    _negative,
)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _each(job: Job, make: Callable[[int], Tensor]) -> list[Tensor]:
    """One of each rank."""
    return [make(rank) for rank in job.ranks]


def _outs(job: Job, make: Callable[[int], Tensor]) -> list[Tensor]:
    return [make(-1 - rank) for rank in job.ranks]


def _all_same(job: Job, what: str, made: Iterator[tuple[Tensor, Tensor]]) -> None:
    for got, expected in made:
        job.same(what, got, expected)


def all_reduce(job: Job, make: Callable[[int], Tensor]) -> None:
    each = _each(job, make)
    x, strides, version = each[job.rank], each[job.rank].stride(), each[job.rank]._version
    expected = combined([part.detach() for part in each], dist.ReduceOp.SUM)
    dist.all_reduce(x, group=job.group)
    job.same(f"all_reduce of {make.__name__}", x, expected)
    job.equal(f"strides of {make.__name__}", x.stride(), strides)
    job.equal(f"the version autograd sees of {make.__name__}", x._version, version)


def broadcast(job: Job, make: Callable[[int], Tensor]) -> None:
    x = make(job.rank)
    dist.broadcast(x, job.size - 1, group=job.group)
    job.same(f"broadcast of {make.__name__}", x, make(job.size - 1))


def all_gather(job: Job, make: Callable[[int], Tensor]) -> None:
    outs = _outs(job, make)
    dist.all_gather(outs, make(job.rank), group=job.group)
    _all_same(job, f"all_gather of {make.__name__}", zip(outs, _each(job, make), strict=True))


def all_gather_into_tensor(job: Job, make: Callable[[int], Tensor]) -> None:
    """Into a transposed output: its elements in their order, not its memory's."""
    x = make(job.rank)
    if x.dim() == 0:
        return
    out = torch.zeros(x.numel(), job.size).t()
    dist.all_gather_into_tensor(out, x, group=job.group)
    expected = torch.stack([each.detach().reshape(-1) for each in _each(job, make)])
    job.same(f"all_gather_into_tensor of {make.__name__}", out, expected)


def reduce_scatter(job: Job, make: Callable[[int], Tensor]) -> None:
    out, parts = make(99), _each(job, make)
    dist.reduce_scatter(out, parts, dist.ReduceOp.MAX, group=job.group)
    job.same(f"reduce_scatter of {make.__name__}", out, make(job.rank))


def gather_and_scatter(job: Job, make: Callable[[int], Tensor]) -> None:
    outs, back = _outs(job, make), make(99)
    dist.gather(make(job.rank), outs if job.rank == 0 else None, 0, group=job.group)
    dist.scatter(back, outs if job.rank == 0 else None, 0, group=job.group)
    job.same(f"gather and scatter of {make.__name__}", back, make(job.rank))


def all_to_all(job: Job, make: Callable[[int], Tensor]) -> None:
    outs = _outs(job, make)
    dist.all_to_all(outs, _each(job, lambda seed: make(seed + 10 * job.rank)), group=job.group)
    expected = [make(job.rank + 10 * rank) for rank in job.ranks]
    _all_same(job, f"all_to_all of {make.__name__}", zip(outs, expected, strict=True))


def send_and_receive(job: Job, make: Callable[[int], Tensor]) -> None:
    out, before = make(99), (job.rank - 1) % job.size
    works = [
        dist.isend(make(job.rank), (job.rank + 1) % job.size, group=job.group),
        dist.irecv(out, before, group=job.group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    job.same(f"send and receive of {make.__name__}", out, make(before))


COLLECTIVES = (
    all_reduce,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    gather_and_scatter,
    all_to_all,
    send_and_receive,
)


def complex_numbers(rank: int, size: int) -> list[str]:
    """Their sum and mean; and a conjugate view, which torch.distributed's functions refuse and its groups don't."""
    job = Job(rank, size)
    each = [torch.view_as_complex(_random(other, LENGTH, 2)) for other in job.ranks]
    total = combined(each, dist.ReduceOp.SUM)
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, _divided(total, size))):
        x = each[rank].clone()
        dist.all_reduce(x, op)
        job.same(f"all_reduce ({op}) of complex64", x, expected)
    x, group = each[rank].clone().conj(), dist.group.WORLD
    assert group is not None
    group.broadcast([x], dist.BroadcastOptions()).wait()
    job.same("broadcast of a conjugate view", x, each[0].conj())
    return job.wrong


def _divided(x: Tensor, divisor: int) -> Tensor:
    return torch.view_as_complex(torch.view_as_real(x) / divisor)


def sparse(rank: int, size: int) -> list[str]:
    """The sum of sparse tensors of which some have nothing, some the same place twice."""
    job = Job(rank, size)
    for shape, sparse_dims in (((7,), 1), ((5, 4, 3), 2)):
        each = [_sparse(other, shape, sparse_dims) for other in job.ranks]
        x = each[rank].clone()
        dist.all_reduce(x)
        job.same(f"sum of sparse {shape}", x.to_dense(), combined([one.to_dense() for one in each], dist.ReduceOp.SUM))
    return job.wrong


def _sparse(rank: int, shape: tuple[int, ...], sparse_dims: int) -> Tensor:
    """``2 * rank`` entries of whole numbers, whose sum has no order."""
    generator = torch.Generator().manual_seed(rank)
    places = torch.stack([torch.randint(n, (2 * rank,), generator=generator) for n in shape[:sparse_dims]])
    values = torch.randint(9, (2 * rank, *shape[sparse_dims:]), generator=generator).double()
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True)
