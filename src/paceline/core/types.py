"""Aliases for numbers with a meaning."""

from typing import Literal, TypeAlias

ReplicaId: TypeAlias = int
"""Number of a replica, 0 .. P-1."""

Version: TypeAlias = int
"""Number of updates of A: the t of A_t."""

Clock: TypeAlias = int
"""Number of Δs that a replica has begun and ended, 1 for its first."""

Seconds: TypeAlias = float
"""Training time since all workers were ready, wall or virtual."""

Nanoseconds: TypeAlias = int
"""A reading of the one clock that all workers of a run share."""

LeaveReason: TypeAlias = Literal["done", "died", "cancelled"]
"""Reason why a replica no longer takes part."""
