"""How A lies among the workers of a replica."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.replica.state import Layout
from paceline.replica.tensor.layouts import Layout as Lies


@dataclass(frozen=True)
class Divided:
    """How one stage's part of A lies among its shards."""

    lies: Mapping[str, Lies]
    """By name; every shard has those tensors that are not named."""
    parts: Sequence[Layout]
    """Of each shard."""
    copies: int = 1
    """How many columns have them."""
