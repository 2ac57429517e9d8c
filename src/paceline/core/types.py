"""Aliases that say what a number means."""

from typing import Literal, TypeAlias

ReplicaId: TypeAlias = int
"""Which replica, 0 .. P-1."""

Version: TypeAlias = int
"""How many updates A has had: the t of A_t."""

Clock: TypeAlias = int
"""How many Δs a replica has begun and ended, 1 for its first."""

Seconds: TypeAlias = float
"""Training time since all workers were ready, wall or virtual."""

Nanoseconds: TypeAlias = int
"""A reading of the one clock that all workers of a run share."""

LeaveReason: TypeAlias = Literal["done", "died", "cancelled"]
"""Why a replica no longer takes part."""
