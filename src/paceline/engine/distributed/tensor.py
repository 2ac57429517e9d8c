"""What a rank has of A where operators are divided among ranks: its part of each parameter."""

from collections.abc import Callable, Mapping
from typing import final

from paceline.engine.distributed.exchange import Meets
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.held import Held
from paceline.engine.distributed.sharded import Sharded
from paceline.engine.distributed.share import Share
from paceline.engine.distributed.stages import Staged
from paceline.engine.distributed.stepping import stepping
from paceline.engine.team.gathering import ByParts
from paceline.engine.team.here import Here
from paceline.engine.team.sharding import Sharding
from paceline.replica.base import Replica, micro_steps
from paceline.replica.loose import worthwhile
from paceline.replica.tensor.parts import counts
from paceline.trace.recorder import AnyRecorder


@final
class TensorShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        self._sharding = sharding = Sharding(here)
        mesh, rank, traffic = sharding.mesh, sharding.rank, here.team.traffic
        state, place = sharding.state, sharding.place
        job = here.setup.job
        names = state.layout.parameter_names if job.program.clip_norm is not None or job.noise_scale else ()
        counted = [name for name in names if counts(sharding.lies.get(name), place.shard)]
        gather = ByParts(state, sharding.whole, sharding.stages, rank, traffic)
        held, freight = Held(state, sharding.whole, counted, gather), Freight(state.layout, ranks=mesh.replicas)
        by_tensor = mesh.replicas == 1 and here.setup.device(rank) == "cpu" and worthwhile(state.layout)
        update, self._exchange = stepping(here, held, freight, sharding.circles.peers, by_tensor=by_tensor)
        self._loose = update.loose if isinstance(update, Staged) else None
        super().__init__(place, state, freight, update, noise=self._exchange.noise(here.setup))

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
        self._replica = self._sharding.worker(micro_steps(self._sharding.setup.delta), recorder, self._loose)
        return self._replica

    def rules(self) -> Mapping[str, str | int | float]:
        sharding = self._sharding
        return {
            "shards": sharding.shards.count,
            "planned_bytes_per_step": sharding.prepared.plan.cost.sent,
            "shard_optimizer": isinstance(self.update, Sharded),
        }
