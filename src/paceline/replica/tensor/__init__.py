"""Δ by shards: each operator of a model cut into parts that work at the same time."""

from paceline.replica.tensor import rules

__all__ = ["rules"]
