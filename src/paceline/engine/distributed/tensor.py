"""What a rank has of A where operators are divided among ranks: its part of each parameter."""

from collections.abc import Callable, Mapping
from typing import final

from torch import nn

from paceline.engine.distributed.exchange import Meets, Traffic
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.leisure import excused
from paceline.engine.distributed.shards import GroupShards
from paceline.engine.distributed.share import Here, Share
from paceline.engine.distributed.stages import Staged, StagedExchange, gathered
from paceline.engine.setup import first_batch
from paceline.replica.base import Replica, micro_steps
from paceline.replica.loose import worthwhile
from paceline.replica.state import Layout, State, read
from paceline.replica.tensor.layouts import Layout as Lies
from paceline.replica.tensor.layouts import Owned, Split
from paceline.replica.tensor.optimizer import refuse_unless_elementwise
from paceline.replica.tensor.parts import counts, part_of
from paceline.replica.tensor.preparation import Prepared, prepared
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.shards import Alone
from paceline.replica.undisturbed import tensors_of
from paceline.trace.recorder import AnyRecorder


@final
class TensorShare(Share):
    """One rank's."""

    def __init__(self, here: Here) -> None:
        setup, team, job = here.setup, here.team, here.setup.job
        mesh, rank, traffic = job.strategy.mesh, team.world.rank, team.traffic
        place = mesh.place(rank)
        self._setup, self._team = setup, team
        self._shards: Alone | GroupShards = Alone() if traffic is None else GroupShards(traffic, place.shard)
        whole = here.state.layout
        self._prepared = self._made(here)
        lies, module = self._prepared.shard.parameters, self._prepared.shard.module
        parts = [part_of(whole, lies, shard) for shard in range(self._shards.count)]
        state = read(module, parts[place.shard].new())
        _let_go(here.module, lies, place.shard)
        freight = Freight(state.layout, ranks=1)
        names = state.layout.parameter_names if job.program.clip_norm is not None else ()
        counted = [name for name in names if counts(lies.get(name), place.shard)]
        self._exchange = StagedExchange(freight, counted, mesh, rank, traffic)
        gather = _Gathering(state, whole, parts, lies, rank, traffic)
        by_tensor = mesh.replicas == 1 and setup.device(rank) == "cpu" and worthwhile(state.layout)
        update = Staged(job.program, freight, state, whole, self._exchange, gather, by_tensor=by_tensor)
        self._loose = update.loose
        super().__init__(place, state, freight, update)

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
        setup = self._setup
        if isinstance(self._shards, GroupShards):
            self._shards.recorder = recorder
        self._replica = TensorParallel(
            setup.job.program,
            self._prepared,
            self._shards,
            self.place.replica,
            self.state.layout,
            setup.device(self._team.world.rank),
            recorder=recorder,
            micro_steps=micro_steps(setup.delta),
            loose=self._loose,
        )
        return self._replica

    def rules(self) -> Mapping[str, str | int | float]:
        return {"shards": self._shards.count, "planned_bytes_per_step": self._prepared.plan.cost.sent}

    def _made(self, here: Here) -> Prepared:
        """This rank's shard of the model; what it takes to find and check it is not counted as training's."""
        job, traffic = self._setup.job, self._team.traffic
        with excused(self._team):
            made = prepared(
                job.program, here.module, first_batch(job), self._shards, self._team.gather, job.strategy.shard_rules
            )
            refuse_unless_elementwise(
                job.program.optimizer, here.state.layout, made.shard.parameters, self._shards.count
            )
        if traffic is not None:
            traffic.sent_bytes = 0
        return made


def _let_go(module: nn.Module, lies: Mapping[str, Lies], shard: int) -> None:
    """Of the memory of tensors that no shard has whole, or not this one: the shard's are its own."""
    for name, tensor in tensors_of(module).items():
        how = lies.get(name)
        if isinstance(how, Split) or (isinstance(how, Owned) and how.shard != shard):
            tensor.data = tensor.data.new_empty(0)


class _Gathering:
    """Makes A of all shards' parts."""

    def __init__(
        self,
        mine: State,
        whole: Layout,
        parts: list[Layout],
        lies: Mapping[str, Lies],
        rank: int,
        traffic: Traffic | None,
    ) -> None:
        self._mine, self._whole, self._parts, self._lies = mine, whole, parts, lies
        self._rank, self._traffic = rank, traffic

    def __call__(self, *, wanted: bool) -> State | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""
        each = gathered(self._mine, self._parts, self._rank, self._traffic, wanted=wanted)
        if each is None:
            return None
        found, named = self._whole.new(), [dict(part.named()) for part in each]
        for name, view in found.named():
            how = self._lies.get(name)
            if isinstance(how, Split):
                view.copy_(how.put_together([part[name] for part in named]))
            else:
                view.copy_(next(part[name] for part in named if name in part))
        return found
