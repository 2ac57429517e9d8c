"""Making the backends known to torch.distributed."""

from typing import Any

import torch.distributed as dist

from paceline.comm import hierarchical
from paceline.comm.shm import process_group
from paceline.comm.shm.region import rendezvous


def register() -> None:
    """Make ``shm`` and ``hierarchical`` known to torch.distributed; once or more often."""
    for name, create in ((process_group.NAME, _shm), (hierarchical.NAME, hierarchical.create)):
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _shm(options: Any, _backend_options: Any) -> process_group.ShmProcessGroup:
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group or range(options.group_size))
    room = rendezvous(options.store, options.group_id, options.group_rank, ranks, timeout_s)
    return process_group.ShmProcessGroup(room, timeout_s)
