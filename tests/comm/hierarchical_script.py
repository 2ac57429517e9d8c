"""What each rank of two hosts does, under torchrun; it says "fine" at the end."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline.comm

torch.set_num_threads(1)
paceline.comm.register()
dist.init_process_group("hierarchical")
rank, size = dist.get_rank(), dist.get_world_size()
numbers = torch.arange(70_000.0, dtype=torch.float64)

for rule, expected in (
    (dist.ReduceOp.SUM, size * numbers + sum(range(size))),
    (dist.ReduceOp.AVG, numbers + sum(range(size)) / size),
    (dist.ReduceOp.MAX, numbers + size - 1),
    (dist.ReduceOp.MIN, numbers),
):
    x = numbers + rank
    dist.all_reduce(x, rule)
    assert torch.equal(x, expected), rule  # whole numbers and halves: exact in any order

transposed = torch.full((7, 3), float(rank)).t()
dist.all_reduce(transposed)
assert transposed.eq(sum(range(size))).all()

for root in range(size):
    x = torch.full((5, 3), float(rank)).t()
    dist.broadcast(x, root)
    assert x.eq(root).all()

gathered = [torch.empty(2) for _ in range(size)]
dist.all_gather(gathered, torch.full((2,), float(rank)))
assert [int(part[0]) for part in gathered] == list(range(size))

own, ranks = torch.full((2,), float(rank)), torch.arange(float(size))
together = torch.empty(2 * size)
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 warns of the other
all_gather_single(together, own)
assert torch.equal(together, ranks.repeat_interleave(2))

share = torch.empty(2)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
reduce_scatter_single(share, together.clone())
assert share.eq(size * rank).all()
dist.reduce_scatter(share, [torch.full((2,), float(to)) for to in range(size)])
assert share.eq(size * rank).all()

x = own.clone()
dist.reduce(x, 0)
assert rank or x.eq(sum(range(size))).all()

gathered = [torch.empty(2) for _ in range(size)] if rank == 0 else []
dist.gather(own, gathered or None)
assert [int(part[0]) for part in gathered] == (list(range(size)) if rank == 0 else [])
dist.scatter(share, [torch.full((2,), float(to)) for to in range(size)] if rank == 0 else None)
assert share.eq(rank).all()

swapped = torch.empty(size)
dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
assert torch.equal(swapped, ranks)
received = [torch.empty(1) for _ in range(size)]
dist.all_to_all(received, [torch.full((1,), float(rank)) for _ in range(size)])
assert torch.equal(torch.cat(received), ranks)

first, second = numbers + rank, numbers * rank
works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
for work in reversed(works) if rank else works:  # whoever waits for the second makes the first first
    work.wait()
assert torch.equal(first, size * numbers + sum(range(size)))
assert torch.equal(second, sum(range(size)) * numbers)

if rank == 0:
    dist.send(torch.ones(4), size - 1)
if rank == size - 1:
    x = torch.zeros(4)
    dist.recv(x, 0)
    assert x.eq(1).all()

objects: list[object] = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": other} for other in range(size)]
dist.barrier()

torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 2).double())
torch.manual_seed(0)
batch = torch.randn(size, 4, dtype=torch.float64)
alone = torch.nn.Linear(4, 2).double()
alone.load_state_dict(model.module.state_dict())
model(batch[rank : rank + 1]).square().mean().backward()
alone(batch).square().mean().backward()
for mine, whole in zip(model.module.parameters(), alone.parameters(), strict=True):
    # Sums of four float64 numbers in another order: a few units in the last place.
    torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-14, atol=1e-15)


def queues() -> int:
    """How many of Gloo's threads there are that hold tensors."""
    return sum("gloo_runloop" in thread.read_text() for thread in Path("/proc/self/task").glob("*/comm"))


assert queues()
dist.destroy_process_group()  # the model still holds the group
assert not queues()
print("fine")
