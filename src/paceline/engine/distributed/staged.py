"""What a rank has of A where a replica has stages: what its own stages need."""

from collections.abc import Callable, Mapping
from typing import final

from paceline.engine.distributed.exchange import Meets
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.held import Held
from paceline.engine.distributed.sharded import Sharded
from paceline.engine.distributed.share import Share
from paceline.engine.distributed.stepping import stepping
from paceline.engine.team.gathering import ByParts
from paceline.engine.team.here import Here
from paceline.engine.team.pipeline import Pipeline
from paceline.engine.team.staged import pipelined
from paceline.replica.base import Replica, micro_steps
from paceline.trace.recorder import AnyRecorder


@final
class StagedShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        self._pipeline = pipeline = Pipeline(here)
        state, divides = pipeline.state, bool(here.setup.job.strategy.shard_optimizer)
        gather = ByParts(state, pipeline.whole, pipeline.stages, pipeline.rank, here.team.traffic)
        held = Held(state, pipeline.whole, pipeline.counted(of_each_copy=divides), gather)
        freight = Freight(state.layout, ranks=pipeline.mesh.replicas)
        update, self._exchange = stepping(here, held, freight, pipeline.circles.peers)
        super().__init__(pipeline.place, state, freight, update, noise=self._exchange.noise(here.setup))

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
        needs = self._pipeline.needs
        return {
            "micro_batches": count,
            "parts": needs.parts,
            "parts_need": str(needs),
            "shard_optimizer": isinstance(self.update, Sharded),
        }
