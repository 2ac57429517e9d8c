"""Messages between two ranks: out of order, large, many at a time, from anyone."""

from itertools import permutations

import torch
import torch.distributed as dist
from shm_values import MOVED, SMALL_BYTES, Job, bits, counts, small_stages
from torch import Tensor


def every_dtype(rank: int, size: int) -> list[str]:
    """Every dtype and size round the ring, through small pieces."""
    with small_stages():
        job = Job(rank, size, dist.new_group())
        after, before = (rank + 1) % size, (rank - 1) % size
        for dtype in MOVED:
            for count in counts(size, dtype.itemsize):
                x, out = bits(rank, count, dtype), torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype)
                _wait(dist.isend(x, after, group=job.group), dist.irecv(out, before, group=job.group))
                job.same(f"{count} {dtype}", out, bits(before, count, dtype))
    return job.wrong


def blocking(rank: int, size: int, elements: int) -> list[str]:
    """``send`` and ``recv`` there and back, larger than all slots of a channel."""
    job, x = Job(rank, size), bits(0, elements, torch.int64)
    for other in range(1, size):
        if rank == 0:
            out = torch.empty_like(x)
            dist.send(x, other)
            job.equal("the source", dist.recv(out, other), other)
            job.same(f"back from {other}", out, x)
        elif rank == other:
            out = torch.empty_like(x)
            dist.recv(out, 0)
            dist.send(out, 0)
    return job.wrong


def tags_out_of_order(rank: int, size: int) -> list[str]:
    """Five messages, received in every order of their tags, before and after they are sent."""
    with small_stages():
        job, total = Job(rank, size, dist.new_group()), 5
        for number, order in enumerate(permutations(range(total))):
            if rank == 0:
                _wait(*(dist.isend(_tagged(number, tag), 1, group=job.group, tag=tag) for tag in range(total)))
            elif number % 2:
                for tag in order:
                    _receive_tagged(job, number, tag)
            else:
                outs = {tag: torch.empty_like(_tagged(number, tag)) for tag in order}
                works = {tag: dist.irecv(outs[tag], 0, group=job.group, tag=tag) for tag in order}
                for tag in sorted(order, key=lambda tag: (tag * 7 + number) % 5):
                    _wait(works[tag])
                    job.same(f"tag {tag} of {number}", outs[tag], _tagged(number, tag))
            dist.barrier(group=job.group)
    return job.wrong


def _tagged(number: int, tag: int) -> Tensor:
    """Of different lengths, some longer than a channel's slots."""
    return bits(tag, 1 + (number * 131 + tag * 977) % (SMALL_BYTES // 2), torch.float32)


def _receive_tagged(job: Job, number: int, tag: int) -> None:
    out = torch.empty_like(_tagged(number, tag))
    dist.recv(out, 0, group=job.group, tag=tag)
    job.same(f"tag {tag} of {number}", out, _tagged(number, tag))


def same_tag_in_order(rank: int, size: int, messages: int) -> list[str]:
    """Many outstanding at once, both ways, more than a channel holds; those of one tag arrive in their order."""
    with small_stages():
        job, group = Job(rank, size), dist.new_group()
        others = [other for other in range(size) if other != rank]
        lengths = [1 + 37 * (n % 40) for n in range(messages)]
        given = [bits(rank, length, torch.int32) + n for n, length in enumerate(lengths)]
        sent = [dist.isend(x, to, group=group) for x in given for to in others]
        outs = {(n, source): torch.empty(lengths[n], dtype=torch.int32) for n in range(messages) for source in others}
        received = {key: dist.irecv(out, key[1], group=group) for key, out in outs.items()}
        _wait(*reversed(received.values()), *sent)
        for (n, source), out in outs.items():
            job.same(f"message {n} of {source}", out, bits(source, lengths[n], torch.int32) + n)
    return job.wrong


def from_anyone(rank: int, size: int, messages: int) -> list[str]:
    """Rank 0 takes what comes, from whoever; each says who it is, and comes in its own order."""
    job = Job(rank, size)
    if rank:
        for n in range(messages):
            dist.send(torch.tensor([rank, n]), 0, tag=5)
        return []
    seen = dict.fromkeys(range(1, size), 0)
    for _ in range(messages * (size - 1)):
        out = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(out, tag=5)
        job.equal("source and number", out.tolist(), [source, seen[source]])
        seen[source] += 1
    job.equal("messages of each", seen, dict.fromkeys(range(1, size), messages))
    return job.wrong


def anyone_and_one(rank: int, size: int) -> list[str]:
    """Receives of one source and of any are posted together: each message goes to the first that may have it."""
    job = Job(rank, size)
    if rank:
        dist.barrier()
        dist.send(torch.tensor([rank, 1]), 0, tag=1)
        dist.send(torch.tensor([rank, 2]), 0, tag=2)
        return []
    one, any_of_two = torch.zeros(2, dtype=torch.int64), [torch.zeros(2, dtype=torch.int64) for _ in range(1, size)]
    works = [dist.irecv(one, size - 1, tag=1), *(dist.irecv(out, tag=2) for out in any_of_two)]
    dist.barrier()
    _wait(*works)
    job.equal("of the last rank", one.tolist(), [size - 1, 1])
    job.equal("of any", sorted(out.tolist() for out in any_of_two), [[other, 2] for other in range(1, size)])
    for other in range(1, size - 1):
        out = torch.zeros(2, dtype=torch.int64)
        job.equal("the source", dist.recv(out, other, tag=1), other)
        job.equal("left over", out.tolist(), [other, 1])
    return job.wrong


def batches(rank: int, size: int) -> list[str]:
    """``batch_isend_irecv``: an exchange with all others, in an order of each rank's own."""
    job = Job(rank, size)
    outs = [torch.zeros(1000 + rank, dtype=torch.float64) for _ in job.ranks]
    operations = []
    for step in range(size):
        to, source = (rank + step) % size, (rank - step) % size
        operations.append(dist.P2POp(dist.irecv, outs[source], source, tag=3))
        operations.insert(0, dist.P2POp(dist.isend, bits(rank, 1000 + to, torch.float64), to, tag=3))
    _wait(*dist.batch_isend_irecv(operations))
    for source, out in enumerate(outs):
        job.same(f"of {source}", out, bits(source, 1000 + rank, torch.float64))
    return job.wrong


def in_a_subgroup(rank: int, size: int) -> list[str]:
    """Sources and destinations of a group's messages are ranks of the job, or of the group where it is so written."""
    job, members = Job(rank, size), list(range(1, size))
    group = dist.new_group(members)
    if rank not in members:
        return []
    place, count = members.index(rank), len(members)
    after, before = members[(place + 1) % count], members[(place - 1) % count]
    for named in ({"dst": after}, {"group_dst": members.index(after)}):
        out = torch.zeros(5, dtype=torch.int64)
        sent = dist.isend(bits(rank, 5, torch.int64), group=group, **named)
        job.equal("the source", dist.recv(out, group=group), before)
        _wait(sent)
        job.same("round the group", out, bits(before, 5, torch.int64))
    return job.wrong


def _wait(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None
        work.wait()
