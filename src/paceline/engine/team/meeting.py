"""How processes that somebody on this host has made become the ranks of a process group."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from paceline.comm import register
from paceline.core.types import Seconds

BACKEND = "shm"
"""What carries their messages."""


def meet(rank: int, size: int, path: str, timeout_s: Seconds) -> None:
    """Make this process one of so many ranks.

    Args:
        rank: which.
        size: how many there are.
        path: of a file by which they find each other.
        timeout_s: the longest wait for the others.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's word for a store that no rank keeps
    register()
    store = FileStore(path, size)  # torch's TCPStore would listen on every interface
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
