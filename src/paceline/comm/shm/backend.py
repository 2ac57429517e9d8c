"""Making the backend known to torch.distributed, and groups of it."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.comm.shm.group import NAME, Group
from paceline.comm.shm.room import meet


def register() -> None:
    """Make backend ``shm`` known to torch.distributed; once or more often."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu"])


def _group(options: Any, _backend_options: Any) -> Group:
    timeout: timedelta = options.timeout
    ranks = options.global_ranks_in_group or range(options.group_size)
    room = meet(options.store, options.group_id, options.group_rank, list(ranks), timeout.total_seconds())
    return Group(room, timeout.total_seconds())
