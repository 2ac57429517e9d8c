"""Whom a worker of one column sends to in another: of their shards, who have all the same, one for each.

::

    2 shards -> 1        1 shard -> 2        2 -> 2
    0 -> 0               0 -> 0              0 -> 0
    1                    0 -> 1              1 -> 1
"""

from dataclasses import dataclass

from paceline.core.mesh import Mesh, Place


@dataclass(frozen=True)
class Routes:
    """One worker's.

    Args:
        mesh: of all ranks.
        place: of this one.
    """

    mesh: Mesh
    place: Place

    def to(self, column: int) -> list[int]:
        """The ranks of a column that take this one's values.

        >>> Routes(Mesh(1, (1, 2)), Place(0, 0)).to(1), Routes(Mesh(1, (2, 1)), Place(0, 0, 1)).to(1)
        ([1, 2], [])
        >>> Routes(Mesh(1, (2, 2), (2, 1)), Place(0, 0, 1)).to(2)
        [2, 3]
        """
        mine, shard = self.mesh.shards(self.place.stage), self.mesh.shard(self.place)
        return [rank for other, rank in enumerate(self._ranks(column)) if other % mine == shard]

    def source(self, column: int) -> int:
        """The rank of a column whose values this one takes.

        >>> Routes(Mesh(1, (1, 2)), Place(0, 1, 1)).source(0), Routes(Mesh(1, (2, 1)), Place(0, 1)).source(0)
        (0, 0)
        """
        ranks = self._ranks(column)
        return ranks[self.mesh.shard(self.place) % len(ranks)]

    def _ranks(self, column: int) -> list[int]:
        return self.mesh.column_ranks(self.place.replica, self.mesh.columns.column(column))
