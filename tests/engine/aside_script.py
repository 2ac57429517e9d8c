"""Waits in threads that nobody has ended when the process does."""

import torch
import torch.distributed as dist

from paceline.engine.team.aside import Aside

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
asides = [Aside() for _ in range(3)]
for aside in asides * 20:
    sent, received = torch.ones(8), torch.empty(8)
    for work in (dist.isend(sent, other), dist.irecv(received, other)):
        aside.begin(work.wait).wait()
    assert torch.equal(sent, received)
dist.barrier()
