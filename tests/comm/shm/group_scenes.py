"""Several groups at once, calls that are waited for later, and several calls as one."""

import os
import random
import threading
import warnings
from itertools import combinations

import torch
import torch.distributed as dist
from shm_values import Job, combined, numbers, small_stages
from torch import Tensor


def interleaved(rank: int, size: int, rounds: int) -> list[str]:
    """All subsets have a group; each rank makes its groups' calls, and waits for them, in an order of its own."""
    with small_stages():
        job, groups = Job(rank, size), _groups(size)
        mine = [(members, group) for members, group in groups if rank in members]
        order = random.Random(rank)
        for step in range(rounds):
            order.shuffle(mine)
            begun = [(members, *_sum(rank, members, group, step)) for members, group in mine]
            order.shuffle(begun)
            for members, x, work in begun:
                work.wait()
                parts = [numbers(other, len(x), torch.float64) for other in members]
                job.same(f"round {step} of {members}", x, combined(parts, dist.ReduceOp.SUM))
    return job.wrong


def _groups(size: int) -> list[tuple[tuple[int, ...], dist.ProcessGroup]]:
    subsets = [members for count in range(1, size + 1) for members in combinations(range(size), count)]
    return [(members, dist.new_group(list(members))) for members in [*subsets, tuple(range(size))]]


def _sum(rank: int, members: tuple[int, ...], group: dist.ProcessGroup, step: int) -> tuple[Tensor, dist.Work]:
    x = numbers(rank, 1 + 97 * step + 301 * len(members), torch.float64).clone()
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    return x, work


def many_under_way(rank: int, size: int, calls: int) -> list[str]:
    """Calls of every kind in one group, all begun before any is waited for, the last first; then computing between."""
    job, begun = Job(rank, size), []
    parts = [numbers(other, 1000, torch.float32) for other in job.ranks]
    total = combined(parts, dist.ReduceOp.SUM)
    for n in range(calls):
        x, root = parts[rank].clone(), n % size
        outs = [torch.empty_like(x) for _ in job.ranks]
        y = parts[rank].clone()
        begun.append((dist.all_reduce(x, async_op=True), x, total))
        begun.append((dist.broadcast(y, root, async_op=True), y, parts[root]))
        begun.append((dist.all_gather(outs, parts[rank], async_op=True), outs[root], parts[root]))
        begun.append((dist.barrier(async_op=True), x, total))
    product = parts[0].view(40, 25) @ parts[0].view(25, 40)
    for work, got, expected in reversed(begun):
        assert work is not None
        work.wait()
        job.equal("completed", (work.is_completed(), work.is_success(), work.exception()), (True, True, None))
        job.same("async", got, expected)
    job.same("computed meanwhile", product, parts[0].view(40, 25) @ parts[0].view(25, 40))
    return job.wrong


def two_threads(rank: int, size: int, calls: int) -> list[str]:
    """Each thread has a group of its own and goes its own pace, as a checkpoint beside training does."""
    jobs = [Job(rank, size, dist.new_group()) for _ in range(2)]
    threads = [threading.Thread(target=_reduce_often, args=(job, calls, 1000 * n + 1)) for n, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [wrong for job in jobs for wrong in job.wrong]


def _reduce_often(job: Job, calls: int, length: int) -> None:
    parts = [numbers(other, length, torch.float64) for other in job.ranks]
    total = combined(parts, dist.ReduceOp.SUM)
    for n in range(calls):
        x = parts[job.rank].clone()
        dist.all_reduce(x, group=job.group)
        job.same(f"call {n} of {length}", x, total)


def completes_by_looking(rank: int, size: int) -> list[str]:
    """``is_completed`` makes progress too, so that who only looks gets on."""
    job, x = Job(rank, size), numbers(rank, 100_000, torch.float64).clone()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    while not work.is_completed():  # bounded by the bound of the scene
        pass
    job.same("sum", x, combined([numbers(other, 100_000, torch.float64) for other in job.ranks], dist.ReduceOp.SUM))
    return job.wrong


def futures(rank: int, size: int) -> list[str]:
    """A call's future holds its outputs; ``then`` runs on them."""
    job, x = Job(rank, size), numbers(rank, 10, torch.float64).clone()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    halves = work.get_future().then(lambda future: future.value()[0] / 2).wait()
    total = combined([numbers(other, 10, torch.float64) for other in job.ranks], dist.ReduceOp.SUM)
    job.same("the output", x, total)
    job.same("what followed", halves, total / 2)
    job.same("the result", work.result()[0], total)
    return job.wrong


def coalesced(rank: int, size: int) -> list[str]:
    """Many calls as one, by the manager and by the functions of their own."""
    job, lengths = Job(rank, size), [0, 1, 7, 1000, 50_000]
    parts = [[numbers(other, n, torch.float32) for n in lengths] for other in job.ranks]
    totals = [combined(list(same), dist.ReduceOp.SUM) for same in zip(*parts, strict=True)]
    for later in (False, True):
        xs = [x.clone() for x in parts[rank]]
        with dist._coalescing_manager(async_ops=later) as manager:
            for x in xs:
                dist.all_reduce(x)
        if later:
            manager.wait()
        _all_same(job, f"all_reduce, later={later}", xs, totals)
        gathered, scattered = _coalesced_pairs(job, parts, later)
        _all_same(job, f"all_gather, later={later}", gathered, [torch.cat(same) for same in zip(*parts, strict=True)])
        _all_same(job, f"reduce_scatter, later={later}", scattered, totals)
    return job.wrong


def coalesced_lists(rank: int, size: int) -> list[str]:
    """``all_gather_coalesced``: an output list holds what one rank gave."""
    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_coalesced", FutureWarning)
    job, lengths = Job(rank, size), [3, 0, 5000]
    each = [[numbers(other, n, torch.float32) for n in lengths] for other in job.ranks]
    outs = [[torch.empty(n) for n in lengths] for _ in job.ranks]
    dist.all_gather_coalesced(outs, each[rank])
    for other in job.ranks:
        _all_same(job, f"of {other}", outs[other], each[other])
    return job.wrong


def _coalesced_pairs(job: Job, parts: list[list[Tensor]], later: bool) -> tuple[list[Tensor], list[Tensor]]:
    gathered = [torch.empty(job.size * x.numel()) for x in parts[job.rank]]
    scattered = [torch.empty(x.numel()) for x in parts[job.rank]]
    with dist._coalescing_manager(async_ops=later) as manager:
        for x, out in zip(parts[job.rank], gathered, strict=True):
            dist.all_gather_into_tensor(out, x)
    if later:
        manager.wait()
    with dist._coalescing_manager(async_ops=later) as manager:
        for x, out in zip(parts[job.rank], scattered, strict=True):
            dist.reduce_scatter_tensor(out, torch.cat([x] * job.size))
    if later:
        manager.wait()
    return gathered, scattered


def _all_same(job: Job, what: str, got: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        job.same(f"{what}, {number}", one, other)


def made_and_destroyed(rank: int, size: int, times: int) -> list[str]:
    """Groups come and go, those of a few with them, and keep no memory and no file descriptor."""
    job = Job(rank, size)
    before = _open_files()
    for n in range(times):
        group = dist.new_group(list(range(n % size + 1)))
        if rank <= n % size:
            x = torch.ones(10)
            dist.all_reduce(x, group=group)
            job.equal("sum", x.sum().item(), 10.0 * (n % size + 1))
            dist.destroy_process_group(group)
    job.equal("open files", _open_files() <= before + size, True)  # the doors of peers, once for all groups
    return job.wrong


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
