"""What one shard has of A."""

from collections.abc import Mapping

from paceline.replica.state import Layout
from paceline.replica.tensor.layouts import Layout as Lies
from paceline.replica.tensor.layouts import Owned, Split


def part_of(whole: Layout, lies: Mapping[str, Lies], shard: int) -> Layout:
    """The layout of a shard's part of A.

    Args:
        whole: of A.
        lies: how tensors lie among the shards, by name; every shard has those that are not named.
        shard: whose part it is.
    """

    def shape(name: str, size: tuple[int, ...]) -> tuple[int, ...] | None:
        how = lies.get(name)
        if isinstance(how, Split):
            return how.local(size, shard)
        return None if isinstance(how, Owned) and how.shard != shard else size

    return whole.reshaped(shape)


def counts(how: Lies | None, shard: int) -> bool:
    """Whether what a shard has of a tensor counts in a sum over all of A: what every shard has counts once."""
    return shard == 0 or isinstance(how, Split | Owned)
