"""What each rank of two hosts does, under torchrun; it says "fine" at the end."""

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

dist.destroy_process_group()
print("fine")
