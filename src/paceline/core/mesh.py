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

The columns of a pipeline: who takes turns at the micro-batches of a stage that several work on.

::

    copies (2, 1)    column   stage  copy   micro-batches
                     0        0      0      0, 2, 4, ...
                     1        0      1      1, 3, 5, ...
                     2        1      0      all
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class StageReplica(NamedTuple):
    """A stage as one of those has it who take turns at it: one worker, or the shards of one."""

    stage: int
    copy: int


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """Those of one replica, numbered stage by stage.

    Args:
        copies: n_s, how many columns each stage has.
    """

    copies: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.copies)

    def __iter__(self) -> Iterator[StageReplica]:
        return (StageReplica(stage, copy) for stage, count in enumerate(self.copies) for copy in range(count))

    def number(self, column: StageReplica) -> int:
        """Which one it is.

        >>> list(map(StageReplicas((2, 1)).number, StageReplicas((2, 1))))
        [0, 1, 2]
        """
        return sum(self.copies[: column.stage]) + column.copy

    def column(self, number: int) -> StageReplica:
        """That of a number.

        >>> StageReplicas((3, 1)).column(2), StageReplicas((3, 1)).column(3)
        (StageReplica(stage=0, copy=2), StageReplica(stage=1, copy=0))
        """
        ends = list(accumulate(self.copies))
        stage = next(s for s, end in enumerate(ends) if number < end)
        return StageReplica(stage, number - (ends[stage] - self.copies[stage]))

    def of(self, stage: int, micro_batch: int) -> int:
        """Who of a stage does a micro-batch: they take turns.

        >>> [StageReplicas((3, 1)).of(0, i) for i in range(5)], StageReplicas((3, 1)).of(1, 4)
        ([0, 1, 2, 0, 1], 3)
        """
        return self.number(StageReplica(stage, micro_batch % self.copies[stage]))

    def same(self, stage: int) -> range:
        """The numbers of all columns of a stage."""
        first = self.number(StageReplica(stage, 0))
        return range(first, first + self.copies[stage])

    def turn(self, column: StageReplica, other: int) -> StageReplica:
        """With which column of another stage a column shares what all columns of a stage have.

        >>> StageReplicas((3, 2)).turn(StageReplica(0, 2), 1)
        StageReplica(stage=1, copy=0)
        """
        return StageReplica(other, column.copy % self.copies[other])


class Coordinate(NamedTuple):
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
    def columns(self) -> StageReplicas:
        """Of a replica."""
        return StageReplicas(self.copies or (1,) * len(self.stage_workers))

    def shards(self, stage: int) -> int:
        """How many workers share an operator of a stage.

        >>> Mesh(1, (4, 1), (2, 1)).shards(0)
        2
        """
        return self.stage_workers[stage] // self.columns.copies[stage]

    def column(self, place: Coordinate) -> StageReplica:
        """Where in its replica a worker is, but for its shard.

        >>> Mesh(1, (4, 1), (2, 1)).column(Coordinate(0, 0, 3)), Mesh(1, (4, 1), (2, 1)).shard(Coordinate(0, 0, 3))
        (StageReplica(stage=0, copy=1), 1)
        """
        return StageReplica(place.stage, place.shard // self.shards(place.stage))

    def shard(self, place: Coordinate) -> int:
        """Which part of each operator a worker has."""
        return place.shard % self.shards(place.stage)

    def column_ranks(self, replica: int, column: StageReplica) -> list[int]:
        """Who share the operators of a column, by shard.

        >>> Mesh(1, (4, 1), (2, 1)).column_ranks(0, StageReplica(0, 1))
        [2, 3]
        """
        shards = self.shards(column.stage)
        places = (Coordinate(replica, column.stage, column.copy * shards + shard) for shard in range(shards))
        return [self.rank(place) for place in places]

    @property
    def per_replica(self) -> int:
        """Workers of one replica."""
        return sum(self.stage_workers)

    @property
    def workers(self) -> int:
        """All of them."""
        return self.replicas * self.per_replica

    def place(self, rank: int) -> Coordinate:
        """Where a rank is.

        >>> Mesh(2, (2, 2)).place(5), Mesh(1, (3, 1)).place(3)
        (Coordinate(replica=1, stage=0, shard=1), Coordinate(replica=0, stage=1, shard=0))
        """
        replica, inside = divmod(rank, self.per_replica)
        starts = self._starts()
        stage = max(s for s, start in enumerate(starts) if start <= inside)
        return Coordinate(replica, stage, inside - starts[stage])

    def rank(self, place: Coordinate) -> int:
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
