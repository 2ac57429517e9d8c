"""Which worker is where: ranks by replica, stage and shard.

::

    replicas=2 stages=2 shards=2      replica 0          replica 1
                                      stage 0  stage 1   stage 0  stage 1
                                      0  1     2  3      4  5     6  7

Shards of a stage are neighbours, then the stages of a replica: so where hosts hold several ranks in a row, those who
talk most share one.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Place(NamedTuple):
    """One worker's."""

    replica: int
    stage: int = 0
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """All workers.

    Args:
        replicas: P.
        stage_workers: how many workers each stage of a replica has.
    """

    replicas: int
    stage_workers: tuple[int, ...]

    @property
    def per_replica(self) -> int:
        """Workers of one replica."""
        return sum(self.stage_workers)

    @property
    def workers(self) -> int:
        """All of them."""
        return self.replicas * self.per_replica

    def place(self, rank: int) -> Place:
        """Where a rank is.

        >>> Mesh(2, (2, 2)).place(5), Mesh(1, (3, 1)).place(3)
        (Place(replica=1, stage=0, shard=1), Place(replica=0, stage=1, shard=0))
        """
        replica, inside = divmod(rank, self.per_replica)
        starts = self._starts()
        stage = max(s for s, start in enumerate(starts) if start <= inside)
        return Place(replica, stage, inside - starts[stage])

    def rank(self, place: Place) -> int:
        """Who is there.

        >>> all(Mesh(2, (3, 1)).rank(Mesh(2, (3, 1)).place(rank)) == rank for rank in range(8))
        True
        """
        return place.replica * self.per_replica + self._starts()[place.stage] + place.shard

    def replica_ranks(self, replica: int) -> range:
        """The ranks of one replica."""
        return range(replica * self.per_replica, (replica + 1) * self.per_replica)

    def _starts(self) -> list[int]:
        return list(accumulate(self.stage_workers[:-1], initial=0))
