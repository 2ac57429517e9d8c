"""Aliases for numbers with a meaning."""

from typing import Literal, TypeAlias

# Number of a replica, 0 .. P-1.
ReplicaId: TypeAlias = int

# Number of updates of A: the t of A_t.
Version: TypeAlias = int

# Number of Δs that a replica has begun and ended, 1 for its first.
Clock: TypeAlias = int

# Training time since all workers were ready, wall or virtual.
Seconds: TypeAlias = float

# A reading of the one clock that all workers of a run share.
Nanoseconds: TypeAlias = int

# Reason why a replica no longer takes part.
LeaveReason: TypeAlias = Literal["done", "died", "cancelled"]

# What a budget is counted in.
BudgetUnit: TypeAlias = Literal["steps", "epochs", "seconds"]

# What a run does about a loss or a gradient that is not finite, and about a replica that dies.
OnNonFinite: TypeAlias = Literal["stop", "skip"]
OnDeath: TypeAlias = Literal["stop", "continue", "replace"]
