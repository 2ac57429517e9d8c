"""What a rank has of A where a replica has stages: what its own stages need."""

from collections.abc import Callable, Mapping
from typing import final

from paceline.engine.distributed.exchange import Meets
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.pipeline import Pipeline
from paceline.engine.distributed.share import Here, Share
from paceline.engine.distributed.stages import ByStages, Staged, StagedExchange
from paceline.replica.base import Replica, micro_steps
from paceline.replica.pipeline.runtime import Pipelined
from paceline.trace.recorder import AnyRecorder


@final
class StagedShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        self._pipeline = Pipeline(here)
        pipeline, traffic = self._pipeline, here.team.traffic
        state = pipeline.state
        freight = Freight(state.layout, ranks=1)
        self._exchange = StagedExchange(freight, self._counted(), pipeline.mesh, pipeline.rank, traffic)
        program, whole, layouts = here.setup.job.program, pipeline.whole, pipeline.layouts
        gather = ByStages(state, whole, layouts, pipeline.rank, traffic)
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
        setup, pipeline = self._pipeline.setup, self._pipeline
        self._replica = Pipelined(
            setup.job.program,
            pipeline.plan(),
            pipeline.cut.captured,
            pipeline.parts,
            pipeline.seat(),
            pipeline.wire(),
            self.state.layout,
            recorder=recorder,
            micro_steps=micro_steps(setup.delta),
            recompute=setup.job.strategy.recompute,
            batchnorm=setup.job.strategy.batchnorm,
        )
        return self._replica

    def rules(self) -> Mapping[str, str | int | float]:
        count = self._pipeline.setup.job.strategy.micro_batch_count
        return {"micro_batches": count, "parts": len(self._pipeline.cut.parts)}

    def _counted(self) -> list[str]:
        """The parameters that count here in the norm of Δ, if that is asked for: a tied one with its first part."""
        pipeline = self._pipeline
        if self._pipeline.setup.job.program.clip_norm is None:
            return []
        first = {
            name: pipeline.order.worker_of(min(p), pipeline.mesh.per_replica) for name, p in pipeline.cut.tied.items()
        }
        stage = pipeline.place.stage
        return [name for name in pipeline.layout.parameter_names if first.get(name, stage) == stage]
