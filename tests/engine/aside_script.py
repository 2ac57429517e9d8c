"""Waits in threads that nobody has ended when the process does."""

import torch
import torch.distributed as dist

from paceline.engine.spmd.p2p import WaitThread

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
asides = [WaitThread() for _ in range(3)]
for aside in asides * 20:
    sent, received = torch.ones(8), torch.empty(8)
    for work in (dist.isend(sent, other), dist.irecv(received, other)):
        aside.begin(work.wait).wait()
    assert torch.equal(sent, received)
dist.barrier()
