"""A model whose operators are divided among ranks, as one of them sees it."""

from collections.abc import Mapping

from torch import nn

from paceline.engine.setup import first_batch
from paceline.engine.team.circles import Circles
from paceline.engine.team.here import Here
from paceline.engine.team.leisure import excused
from paceline.engine.team.parts import Divided
from paceline.engine.team.shards import GroupShards
from paceline.replica.loose import Loose
from paceline.replica.state import read
from paceline.replica.tensor.layouts import Layout as Lies
from paceline.replica.tensor.layouts import Owned, Split
from paceline.replica.tensor.optimizer import refuse_unless_elementwise
from paceline.replica.tensor.parts import part_of
from paceline.replica.tensor.preparation import Prepared, prepared
from paceline.replica.tensor.runtime import TensorParallel
from paceline.replica.tensor.shards import Alone
from paceline.replica.undisturbed import tensors_of
from paceline.trace.recorder import AnyRecorder


class Sharding:
    """One rank's view; all ranks make it together.

    Args:
        here: the rank.
    """

    def __init__(self, here: Here) -> None:
        self.setup, self._team = here.setup, here.team
        self.mesh, self.rank = here.mesh, here.team.world.rank
        self.place = self.mesh.place(self.rank)
        self._replica = self.place.replica if here.replica is None else here.replica
        self.circles = Circles.of(self.mesh, here.team.traffic)
        among = self.circles.shards
        self.shards: Alone | GroupShards = Alone() if among is None else GroupShards(among, self.place.shard)
        self.whole = here.layout
        """The layout of A."""
        self.prepared = self._made(here)
        self.lies = self.prepared.shard.parameters
        """How the tensors of A lie among the shards, by name."""
        parts = [part_of(self.whole, self.lies, shard) for shard in range(self.shards.count)]
        self.stages = [Divided(self.lies, parts)]
        self.layout = parts[self.place.shard]
        """Of this rank's part of A."""
        self.state = read(self.prepared.shard.module, self.layout.new())
        """This rank's part of A_0."""
        _let_go(here.module, self.lies, self.place.shard)

    def worker(self, micro_steps: int, recorder: AnyRecorder, loose: Loose | None = None) -> TensorParallel:
        """What computes Δ here.

        Args:
            micro_steps: batches of one Δ.
            recorder: of this rank's spans.
            loose: takes the gradients; None: they are written into the slot.
        """
        if isinstance(self.shards, GroupShards):
            self.shards.recorder = recorder
        return TensorParallel(
            self.setup.job.program,
            self.prepared,
            self.shards,
            self._replica,
            self.layout,
            self.setup.device(self.rank),
            recorder=recorder,
            micro_steps=micro_steps,
            loose=loose,
        )

    def _made(self, here: Here) -> Prepared:
        """This rank's shard of the model; what it takes to find and check it is not counted as training's."""
        job, traffic, rules = self.setup.job, self._team.traffic, self.setup.job.strategy.shard_rules
        with excused(self._team):
            made = prepared(job.program, here.module, first_batch(job), self.shards, self._team.gather, rules)
            if here.steps_on_parts:
                lies = made.shard.parameters
                refuse_unless_elementwise(job.program.optimizer, self.whole, lies, self.shards.count)
        if traffic is not None:
            traffic.sent_bytes = 0
        return made


def _let_go(module: nn.Module, lies: Mapping[str, Lies], shard: int) -> None:
    """Of the memory of tensors that no shard has whole, or not this one: the shard's are its own."""
    for name, tensor in tensors_of(module).items():
        how = lies.get(name)
        if isinstance(how, Split) or (isinstance(how, Owned) and how.shard != shard):
            tensor.data = tensor.data.new_empty(0)
