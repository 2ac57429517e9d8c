"""The mesh: ranks by replica, stage and shard, and the replicas of single stages.

::

    replicas=2 stages=2 shards=2      replica 0          replica 1
                                      stage 0  stage 1   stage 0  stage 1
                                      0  1     2  3      4  5     6  7

Shards of a stage are neighbours, then the stages of a replica: so if hosts hold several ranks in a row, ranks that
communicate most share a host. A stage may itself be replicated (PipeDream); its replicas take the micro-batches in
turn. Each stage replica has shards of its own, and the workers of the stage are numbered replica by replica::

    stages=[2,1] shards=[2,1]         stage 0            stage 1
                                      copy 0   copy 1    copy 0
                                      0  1     2  3      4

    copies (2, 1)    stage replica   stage  copy   micro-batches
                     0               0      0      0, 2, 4, ...
                     1               0      1      1, 3, 5, ...
                     2               1      0      all
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class StageReplica(NamedTuple):
    """One replica of a stage, a worker or all shards of one: processes every n-th micro-batch."""

    stage: int
    copy: int


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """All stage replicas of one replica of the model, numbered stage by stage.

    Args:
        copies: n_s, the number of replicas of each stage.
    """

    copies: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.copies)

    def __iter__(self) -> Iterator[StageReplica]:
        return (StageReplica(stage, copy) for stage, count in enumerate(self.copies) for copy in range(count))

    def number(self, stage_replica: StageReplica) -> int:
        """Return the number of a stage replica.

        >>> list(map(StageReplicas((2, 1)).number, StageReplicas((2, 1))))
        [0, 1, 2]
        """
        return sum(self.copies[: stage_replica.stage]) + stage_replica.copy

    def at(self, number: int) -> StageReplica:
        """Return the stage replica of a number.

        >>> StageReplicas((3, 1)).at(2), StageReplicas((3, 1)).at(3)
        (StageReplica(stage=0, copy=2), StageReplica(stage=1, copy=0))
        """
        ends = list(accumulate(self.copies))
        stage = next(s for s, end in enumerate(ends) if number < end)
        return StageReplica(stage, number - (ends[stage] - self.copies[stage]))

    def processing(self, stage: int, micro_batch: int) -> int:
        """Return the number of the replica of a stage that processes a micro-batch.

        >>> [StageReplicas((3, 1)).processing(0, i) for i in range(5)], StageReplicas((3, 1)).processing(1, 4)
        ([0, 1, 2, 0, 1], 3)
        """
        return sum(self.copies[:stage]) + micro_batch % self.copies[stage]

    def of_stage(self, stage: int) -> range:
        """Return the numbers of all replicas of a stage."""
        first = sum(self.copies[:stage])
        return range(first, first + self.copies[stage])

    def partner(self, stage_replica: StageReplica, stage: int) -> StageReplica:
        """Return the replica of another stage with which this one exchanges what all replicas of its stage have.

        >>> StageReplicas((3, 2)).partner(StageReplica(0, 2), 1)
        StageReplica(stage=1, copy=0)
        """
        return StageReplica(stage, stage_replica.copy % self.copies[stage])


class Coordinate(NamedTuple):
    """Position of one worker in the mesh."""

    replica: int
    stage: int = 0
    shard: int = 0
    """Number among the workers of the stage, all its replicas (see :meth:`Mesh.stage_replica`)."""

    @property
    def label(self) -> str:
        """Name of a worker of a replica that has several, in words that follow "replica".

        >>> Coordinate(1, 0, 2).label
        '1 (stage 0, shard 2)'
        """
        return f"{self.replica} (stage {self.stage}, shard {self.shard})"


@dataclass(frozen=True, slots=True)
class Mesh:
    """All workers.

    Args:
        replicas: P.
        stage_workers: the number of workers of each stage of a replica.
        copies: the number of replicas of each stage; empty: one of each.
    """

    replicas: int
    stage_workers: tuple[int, ...]
    copies: tuple[int, ...] = ()

    @property
    def stage_replicas(self) -> StageReplicas:
        """The stage replicas of one replica of the model."""
        return StageReplicas(self.copies or (1,) * len(self.stage_workers))

    def shards(self, stage: int) -> int:
        """Return the number of workers that share each operator of a stage.

        >>> Mesh(1, (4, 1), (2, 1)).shards(0)
        2
        """
        return self.stage_workers[stage] // (self.copies[stage] if self.copies else 1)

    def stage_replica(self, coordinate: Coordinate) -> StageReplica:
        """Return the stage replica of a worker.

        >>> mesh, worker = Mesh(1, (4, 1), (2, 1)), Coordinate(0, 0, 3)
        >>> mesh.stage_replica(worker), mesh.shard(worker)
        (StageReplica(stage=0, copy=1), 1)
        """
        return StageReplica(coordinate.stage, coordinate.shard // self.shards(coordinate.stage))

    def shard(self, coordinate: Coordinate) -> int:
        """Return the number of a worker's shard of each operator."""
        return coordinate.shard % self.shards(coordinate.stage)

    def stage_replica_ranks(self, replica: int, stage_replica: StageReplica) -> list[int]:
        """Return the ranks that share the operators of a stage replica, by shard.

        >>> Mesh(1, (4, 1), (2, 1)).stage_replica_ranks(0, StageReplica(0, 1))
        [2, 3]
        """
        shards = self.shards(stage_replica.stage)
        first = self.rank(Coordinate(replica, stage_replica.stage, stage_replica.copy * shards))
        return list(range(first, first + shards))

    @property
    def per_replica(self) -> int:
        """Number of workers of one replica."""
        return sum(self.stage_workers)

    @property
    def workers(self) -> int:
        """Number of all workers."""
        return self.replicas * self.per_replica

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of a rank.

        >>> Mesh(2, (2, 2)).coordinate(5), Mesh(1, (3, 1)).coordinate(3)
        (Coordinate(replica=1, stage=0, shard=1), Coordinate(replica=0, stage=1, shard=0))
        """
        replica, shard = divmod(rank, self.per_replica)
        stage = 0
        while shard >= self.stage_workers[stage]:
            shard -= self.stage_workers[stage]
            stage += 1
        return Coordinate(replica, stage, shard)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Stage and shard of each rank; ranks that have both in common have the same part of the model.

        >>> Mesh(1, (4, 1), (2, 1)).parts
        [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0)]
        """
        places = map(self.coordinate, range(self.workers))
        return [(place.stage, self.shard(place)) for place in places]

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at a position.

        >>> all(Mesh(2, (3, 1)).rank(Mesh(2, (3, 1)).coordinate(rank)) == rank for rank in range(8))
        True
        """
        before = sum(self.stage_workers[: coordinate.stage])
        return coordinate.replica * self.per_replica + before + coordinate.shard

    def replica_ranks(self, replica: int) -> range:
        """Return the ranks of one replica."""
        return range(replica * self.per_replica, (replica + 1) * self.per_replica)
