"""What a rank has of A where a replica has stages: what its own stages need."""

from collections.abc import Callable, Mapping
from typing import final

from paceline.engine.distributed.exchange import Meets
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.share import Share
from paceline.engine.distributed.stages import Staged, StagedExchange
from paceline.engine.team.here import Here
from paceline.engine.team.parts import ByParts
from paceline.engine.team.pipeline import Pipeline
from paceline.engine.team.staged import pipelined
from paceline.replica.base import Replica, micro_steps
from paceline.trace.recorder import AnyRecorder


@final
class StagedShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        self._pipeline = Pipeline(here)
        pipeline, traffic = self._pipeline, here.team.traffic
        state = pipeline.state
        mesh, rank, peers = pipeline.mesh, pipeline.rank, pipeline.circles.peers
        freight = Freight(state.layout, ranks=mesh.replicas)
        self._exchange = StagedExchange(freight, pipeline.counted(), mesh, rank, traffic, peers)
        program, whole = here.setup.job.program, pipeline.whole
        gather = ByParts(state, whole, pipeline.stages, rank, traffic)
        update = Staged(program, freight, state, whole, self._exchange, gather)
        super().__init__(pipeline.place, state, freight, update)

    @property
    def parameter_bytes(self) -> int:
        return self.state.layout.parameter_bytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return self._replica.peak_saved_bytes

    def exchange(self) -> Meets:
        return self._exchange

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        del weigh  # Δ is scaled when all of it is there
        self._replica = pipelined(self._pipeline, micro_steps(self._pipeline.setup.delta), recorder)
        return self._replica

    def rules(self) -> Mapping[str, str | int | float]:
        count = self._pipeline.setup.job.strategy.micro_batch_count
        return {"micro_batches": count, "parts": len(self._pipeline.cut.parts)}
