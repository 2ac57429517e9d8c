"""A model divided among the ranks of its pipeline, as one of them sees it."""

import os

from paceline.core.mesh import Place
from paceline.engine.distributed.leisure import excused
from paceline.engine.distributed.share import Here
from paceline.engine.distributed.wire import GroupWire
from paceline.engine.setup import first_batch
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.messages import Plan
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.preparation import Agree, prepared
from paceline.replica.pipeline.wire import Alone, Wire
from paceline.replica.pipeline.workplace import Seat
from paceline.replica.state import Layout
from paceline.replica.undisturbed import tensors_of


class Pipeline:
    """One rank's view; all ranks make it together.

    Args:
        here: the rank.
    """

    def __init__(self, here: Here) -> None:
        self.setup, self.team, job, world = here.setup, here.team, here.setup.job, here.team.world
        self.mesh, self.order = job.strategy.mesh, job.strategy.order
        self.rank, self.place = world.rank, self.mesh.place(world.rank)
        with excused(here.team):
            self.cut = prepared(job.program, job.strategy, here.module, first_batch(job), self._agreement()).cut
        self.whole = here.state.layout
        """The layout of A."""
        self.layouts = [self._layout(self.mesh.place(rank)) for rank in range(world.size)]
        """Of each rank's part of A."""
        self.state = self.layout.new().take(here.state)
        """This rank's part of A_0."""

    @property
    def layout(self) -> Layout:
        """Of this rank's part of A."""
        return self.layouts[self.rank]

    @property
    def parts(self) -> list[Part]:
        """This rank's."""
        return self._parts(self.place)

    def plan(self) -> Plan:
        """In which order all workers of a replica work."""
        strategy = self.setup.job.strategy
        return Plan.of(self.cut, self.order, strategy.stage_count, strategy.micro_batch_count)

    def seat(self) -> Seat:
        """Which worker this rank is."""
        return Seat(self.place.replica, self.place.stage, self.setup.device(self.rank))

    def wire(self) -> Wire:
        """To the others of its replica."""
        traffic = self.team.traffic
        return Alone() if traffic is None else GroupWire(traffic, self.mesh.replica_ranks(self.place.replica))

    def holders(self, name: str) -> list[int]:
        """The workers of a replica that hold a parameter of several parts; of any other, none."""
        workers = self.mesh.per_replica
        return sorted({self.order.worker_of(part, workers) for part in self.cut.tied.get(name, ())})

    def _agreement(self) -> Agree:
        """What the first rank chooses; where there are too few cores for all, the others begin when it has chosen."""
        world = self.team.world
        if world.rank == 0:
            return lambda choose: self._said(choose())
        if world.local_size <= len(os.sched_getaffinity(0)):
            return lambda _: self._said(())
        said = self._said(())
        return lambda _: said

    def _said(self, mine: Boundaries) -> Boundaries:
        said: Boundaries = self.team.gather(mine, "where the model is cut")[0]
        return said

    def _parts(self, place: Place) -> list[Part]:
        workers = self.mesh.per_replica
        return [part for part in self.cut.parts if self.order.worker_of(part.number, workers) == place.stage]

    def _layout(self, place: Place) -> Layout:
        return self.whole.part({name for part in self._parts(place) for name in tensors_of(part.module)})
