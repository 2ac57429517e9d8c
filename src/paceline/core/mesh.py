"""Which worker is where: ranks by replica, stage and shard.

::

    replicas=2 stages=2 shards=2      replica 0          replica 1
                                      stage 0  stage 1   stage 0  stage 1
                                      0  1     2  3      4  5     6  7

Shards of a stage are neighbours, then the stages of a replica: so where hosts hold several ranks in a row, those who
talk most share one. Where several columns take turns at a stage, each has shards of its own, and the workers of the
stage are numbered column by column::

    stages=[2,1] shards=[2,1]         stage 0            stage 1
                                      copy 0   copy 1    copy 0
                                      0  1     2  3      4
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.core.columns import Column, Columns


class Place(NamedTuple):
    """One worker's."""

    replica: int
    stage: int = 0
    shard: int = 0
    """Which of the workers of the stage; where columns take turns at it, :meth:`Mesh.column` says whose."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """All workers.

    Args:
        replicas: P.
        stage_workers: how many workers each stage of a replica has.
        copies: how many columns take turns at each stage; empty: one at each.
    """

    replicas: int
    stage_workers: tuple[int, ...]
    copies: tuple[int, ...] = ()

    @property
    def columns(self) -> Columns:
        """Of a replica."""
        return Columns(self.copies or (1,) * len(self.stage_workers))

    def shards(self, stage: int) -> int:
        """How many workers share an operator of a stage.

        >>> Mesh(1, (4, 1), (2, 1)).shards(0)
        2
        """
        return self.stage_workers[stage] // self.columns.copies[stage]

    def column(self, place: Place) -> Column:
        """Where in its replica a worker is, but for its shard.

        >>> Mesh(1, (4, 1), (2, 1)).column(Place(0, 0, 3)), Mesh(1, (4, 1), (2, 1)).shard(Place(0, 0, 3))
        (Column(stage=0, copy=1), 1)
        """
        return Column(place.stage, place.shard // self.shards(place.stage))

    def shard(self, place: Place) -> int:
        """Which part of each operator a worker has."""
        return place.shard % self.shards(place.stage)

    def column_ranks(self, replica: int, column: Column) -> list[int]:
        """Who share the operators of a column, by shard.

        >>> Mesh(1, (4, 1), (2, 1)).column_ranks(0, Column(0, 1))
        [2, 3]
        """
        shards = self.shards(column.stage)
        places = (Place(replica, column.stage, column.copy * shards + shard) for shard in range(shards))
        return [self.rank(place) for place in places]

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
