"""Ends a process whose wait threads are still running."""

import torch
import torch.distributed as dist

from paceline.engine.spmd.p2p import WaitThread

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
threads = [WaitThread() for _ in range(3)]
for thread in threads * 20:
    sent, received = torch.ones(8), torch.empty(8)
    for work in (dist.isend(sent, other), dist.irecv(received, other)):
        thread.begin(work.wait).wait()
    assert torch.equal(sent, received)
dist.barrier()
