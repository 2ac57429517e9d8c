"""The ranks with which one shares something: a stage, or the same part of A.

::

    replicas=2 stages=2 shards=2

                 replica 0            replica 1
    stage 0     (0    1)             (4    5)          shards: who work on one stage of one replica
    stage 1     (2    3)             (6    7)          peers: 0 and 4, 1 and 5, 2 and 6, 3 and 7

    stages=[2,1] shards=[2,1]

    stage 0     (0    1)  (2    3)                     shards: who share a column
    stage 1     (4)                                    copies: who take turns at a stage, 0 and 2, 1 and 3

    replicas=2 stages=[2,1]

    stage 0      0    1               3    4           holders: who have the same part of A anywhere, 0, 1, 3 and 4
    stage 1      2                    5                and 2 and 5
"""

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.mesh import Mesh, Place
from paceline.engine.team.traffic import Traffic


@dataclass(frozen=True)
class Circles:
    """One rank's; None where it is alone."""

    shards: Traffic | None
    """With those who work on the same column of the same replica."""
    copies: Traffic | None
    """With those who have the same part of A in other columns of the same stage and replica."""
    peers: Traffic | None
    """With those who have the same part of A in other replicas."""

    @classmethod
    def of(cls, mesh: Mesh, traffic: Traffic | None) -> "Circles":
        """Those of a mesh; all ranks make them together."""
        if traffic is None:
            return cls(None, None, None)
        replicas, stages = range(mesh.replicas), range(len(mesh.stage_workers))
        shards = [mesh.column_ranks(r, column) for r in replicas for column in mesh.columns]
        peers = [[mesh.rank(Place(r, s, i)) for r in replicas] for s in stages for i in range(mesh.stage_workers[s])]
        copies = [list(each) for r in replicas for s in stages for each in zip(*_columns(mesh, r, s), strict=True)]
        return cls(traffic.circle(shards), traffic.circle(copies), traffic.circle(peers))


class Circle(NamedTuple):
    """Some ranks, as one of them sees it."""

    traffic: Traffic | None
    """None: it is alone."""
    rank: int
    """Which of them it is."""


def holders(mesh: Mesh, rank: int, traffic: Traffic, peers: Traffic | None) -> Circle:
    """Who have the same part of A, in any column of any replica; all ranks make it together.

    Args:
        mesh: of all ranks.
        rank: whose.
        traffic: of the whole run.
        peers: those in other replicas, who are all where nobody takes turns.
    """
    place, replicas = mesh.place(rank), range(mesh.replicas)
    mine, copies = mesh.column(place), mesh.columns.copies[place.stage]
    number = place.replica * copies + mine.copy
    if max(mesh.columns.copies) == 1:
        return Circle(peers, number)
    stages = range(len(mesh.stage_workers))
    each = [zip(*(column for r in replicas for column in _columns(mesh, r, s)), strict=True) for s in stages]
    return Circle(traffic.circle([list(ranks) for stage in each for ranks in stage]), number)


def _columns(mesh: Mesh, replica: int, stage: int) -> list[list[int]]:
    """The ranks of each column of a stage."""
    return [mesh.column_ranks(replica, column) for column in mesh.columns if column.stage == stage]
