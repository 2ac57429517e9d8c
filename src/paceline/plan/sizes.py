"""Sizes that follow from an arrangement's."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from paceline.plan.base import Arrangement


def turns(arrangement: Arrangement, j: int) -> int:
    """How many micro-batches of a step the one has who begins, of those who take turns at a stage."""
    return arrangement.accumulated * own_turns(arrangement, j)


def own_turns(arrangement: Arrangement, j: int) -> int:
    """⌈m / n_j⌉: the same of one mini-batch."""
    return ceil(mini_batch(arrangement) / copies_of(arrangement)[j])


def mini_batch(arrangement: Arrangement) -> int:
    """Micro-batches from one time that the pipeline is empty to the next."""
    return arrangement.micro_batches // arrangement.accumulated


def copies_of(arrangement: Arrangement) -> Sequence[int]:
    """How many take turns at each stage."""
    return arrangement.copies or (1,) * arrangement.stages


def shards_of(arrangement: Arrangement) -> Sequence[int]:
    """How many each stage has."""
    return arrangement.stage_shards or (arrangement.shards,) * arrangement.stages


def with_shards(arrangement: Arrangement, shards: int) -> Arrangement:
    """The same with so many at each stage: what layers of a stage that has them go by."""
    if arrangement.shards == shards and not arrangement.stage_shards:
        return arrangement
    return replace(arrangement, shards=shards, stage_shards=())


def holders(arrangement: Arrangement, j: int) -> int:
    """Workers that have the same part of A: of each replica as many as take turns at stage j."""
    return arrangement.replicas * arrangement.context * copies_of(arrangement)[j]


def exchanges(arrangement: Arrangement) -> tuple[int, int]:
    """How often a step of replicas that divide what they have sums Δ and gathers A: (reduce_scatters, all_gathers)."""
    if arrangement.divided < 3:
        return 1, 1
    return arrangement.micro_batches if arrangement.stages == 1 else 1, 2 * arrangement.micro_batches
