"""A, of the parts that the workers of a replica have of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.comm.spill import Spill
from paceline.engine.team.parts import Divided
from paceline.engine.team.traffic import Traffic
from paceline.engine.team.windows import Windows
from paceline.replica.state import Layout, State
from paceline.replica.tensor.layouts import Split


@dataclass(frozen=True)
class ByParts:
    """A of the parts of all workers of a replica, one part after the other.

    Args:
        mine: this rank's part.
        whole: the layout of A.
        stages: in order.
        rank: whose.
        traffic: to the others; None: this part is all.
    """

    mine: State
    whole: Layout
    stages: Sequence[Divided]
    rank: int
    traffic: Traffic | None

    def __call__(self, *, wanted: bool) -> State | None:
        """A copy of A where it is wanted, None elsewhere; all ranks call it together."""
        spill = Spill()
        found = self.whole.new(spill.empty) if wanted else None
        written = set[str]()
        for source, stage, shard in self._sources():
            part = self._part(source, stage.parts[shard])
            names = {n for n, _ in part.named() if n not in written or isinstance(stage.lies.get(n), Split)}
            if found is not None:
                Windows(part, found, stage.lies, shard, names).put()
                spill.settle()
            written |= names
        return found

    def _part(self, source: int, layout: Layout) -> State:
        """That of one rank."""
        part = self.mine if source == self.rank else layout.new()
        if self.traffic is not None:
            sent = self.traffic.sent_bytes  # it is for scores, so its bytes are not counted as training's
            for vector in part.vectors:
                self.traffic.broadcast(vector, source, "the gathering of A")
            self.traffic.sent_bytes = sent
        return part

    def _sources(self) -> Iterator[tuple[int, Divided, int]]:
        """Who tell of their parts: of the first replica, whose ranks come first, the first column of each stage."""
        start = 0
        for stage in self.stages:
            for shard in range(len(stage.parts)):
                yield start + shard, stage, shard
            start += stage.copies * len(stage.parts)
