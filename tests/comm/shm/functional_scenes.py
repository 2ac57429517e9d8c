"""What FSDP2, DTensor, DCP and compiled code call: functional collectives, those of autograd, and of objects."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from shm_values import Job, combined, numbers
from torch import Tensor

ROWS, COLUMNS = 6, 10


def _take_old_names() -> None:
    """torch 2.13 says that they are old; 2.11 knows no others."""
    warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives", FutureWarning)


def functional_collectives(rank: int, size: int) -> list[str]:
    """Each returns a new tensor that is waited for when it is used."""
    _take_old_names()
    job, group = Job(rank, size), dist.group.WORLD
    each = [numbers(other, size * ROWS * COLUMNS, torch.float64).view(size * ROWS, COLUMNS) for other in job.ranks]
    x, total = each[rank], combined(each, dist.ReduceOp.SUM)
    job.same("all_reduce", functional.all_reduce(x, "sum", group) + 0, total)
    job.same("all_reduce avg", functional.all_reduce(x, "avg", group) + 0, total / size)
    job.same("broadcast", functional.broadcast(x, size - 1, group) + 0, each[-1])
    for dim in (0, 1):
        gathered = functional.all_gather_tensor(x, dim, group) + 0
        job.same(f"all_gather {dim}", gathered, torch.cat(each, dim))
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, group) + 0
    job.same("reduce_scatter 0", scattered, total.chunk(size)[rank])
    wide = [other.t().contiguous() for other in each]
    scattered = functional.reduce_scatter_tensor(wide[rank], "sum", 1, group) + 0
    job.same("reduce_scatter 1", scattered, combined(wide, dist.ReduceOp.SUM).chunk(size, 1)[rank])
    exchanged = functional.all_to_all_single(x, None, None, group) + 0
    job.same("all_to_all", exchanged, torch.cat([other.chunk(size)[rank] for other in each]))
    permuted = functional.permute_tensor(x.view(-1), [(other + 1) % size for other in job.ranks], group) + 0
    job.same("permute", permuted, each[(rank - 1) % size].view(-1))
    return job.wrong


def functional_coalesced(rank: int, size: int) -> list[str]:
    """Lists of tensors in one call, each of them waited for by itself."""
    _take_old_names()
    job, group = Job(rank, size), dist.group.WORLD
    lengths = [size, 3 * size, 1000 * size]
    each = [[numbers(other, n, torch.float64) for n in lengths] for other in job.ranks]
    same = list(zip(*each, strict=True))
    totals = [combined(list(parts), dist.ReduceOp.SUM) for parts in same]
    reduced = functional.all_reduce_coalesced(each[rank], "sum", group)
    gathered = functional.all_gather_into_tensor_coalesced(each[rank], group)
    scattered = functional.reduce_scatter_tensor_coalesced(each[rank], "sum", [0] * len(lengths), group)
    for n in reversed(range(len(lengths))):
        job.same(f"all_reduce {n}", reduced[n] + 0, totals[n])
        job.same(f"all_gather {n}", gathered[n] + 0, torch.cat(same[n]))
        job.same(f"reduce_scatter {n}", scattered[n] + 0, totals[n].chunk(size)[rank])
    return job.wrong


def gradients(rank: int, size: int) -> list[str]:
    """Through collectives: each rank's loss is w·y, so the gradient of its x is the transpose applied to all w."""
    job, group = Job(rank, size), dist.group.WORLD
    xs = [numbers(other, size * COLUMNS, torch.float64).view(size, COLUMNS) for other in job.ranks]
    ws = [numbers(other + size, size * COLUMNS, torch.float64).view(size, COLUMNS) for other in job.ranks]
    total = combined(ws, dist.ReduceOp.SUM)
    job.same("all_reduce", _gradient(differentiable.all_reduce, xs[rank], ws[rank]), total)
    turned = torch.stack([w[rank] for w in ws])
    exchange = _gradient(lambda x: functional.all_to_all_single_autograd(x, None, None, group), xs[rank], ws[rank])
    job.same("all_to_all", exchange, turned)
    gather = _gradient(lambda x: functional.all_gather_tensor_autograd(x, 0, group), xs[rank][0:1], ws[rank])
    job.same("all_gather", gather, total[rank : rank + 1])
    scatter = _gradient(
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group), xs[rank], ws[rank][0:1]
    )
    job.same("reduce_scatter", scatter, torch.stack([w[0] for w in ws]))
    return job.wrong


def _gradient(function: object, x: Tensor, w: Tensor) -> Tensor:
    assert callable(function)
    x = x.clone().requires_grad_()
    (function(x) * w).sum().backward()
    assert x.grad is not None
    return x.grad


def objects(rank: int, size: int) -> list[str]:
    """Pickled values of any size, by all functions for them."""
    job = Job(rank, size)
    each = [{"rank": other, "text": "é" * (1 + 70_000 * other), "tensor": [1.5] * other} for other in job.ranks]
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, each[rank])
    job.equal("all_gather_object", gathered == each, True)
    at_root: list[object] | None = [None] * size if rank == size - 1 else None
    dist.gather_object(each[rank], at_root, dst=size - 1)
    job.equal("gather_object", at_root == (each if rank == size - 1 else None), True)
    said: list[object] = [each[-1], "two"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(said, src=size - 1)
    job.equal("broadcast_object_list", said == [each[-1], "two"], True)
    part: list[object] = [None]
    dist.scatter_object_list(part, each if rank == 0 else None, src=0)
    job.equal("scatter_object_list", part == [each[rank]], True)
    if rank == 0 and size > 1:
        dist.send_object_list([each[1], 3], dst=size - 1)
    elif rank == size - 1 and size > 1:
        received: list[object] = [None, None]
        dist.recv_object_list(received, src=0)
        job.equal("recv_object_list", received == [each[1], 3], True)
    return job.wrong
