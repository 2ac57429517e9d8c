"""A, of the parts that the workers of a replica have of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.team.traffic import Traffic
from paceline.replica.state import Layout, State
from paceline.replica.tensor.layouts import Layout as Lies
from paceline.replica.tensor.layouts import Split


@torch.no_grad()
def gathered(
    mine: State, parts: Mapping[int, Layout], rank: int, traffic: Traffic | None, *, wanted: bool
) -> list[State] | None:
    """Copies of some ranks' parts where they are wanted, None elsewhere; all ranks call it together.

    Args:
        mine: this rank's part.
        parts: the layouts of those ranks' parts.
        rank: whose.
        traffic: to the others; None: this part is all.
        wanted: whether they are wanted here.
    """
    if traffic is None:
        return [mine.clone()] if wanted else None
    sent = traffic.sent_bytes  # it is for scores, so its bytes are not counted as training's
    found = list[State]()
    for source, layout in parts.items():
        part = mine if source == rank else layout.new()
        for vector in part.vectors:
            traffic.broadcast(vector, source, "the gathering of A")
        if wanted:
            found.append(part.clone() if source == rank else part)
    traffic.sent_bytes = sent
    return found if wanted else None


@dataclass(frozen=True)
class Divided:
    """How one stage's part of A lies among its shards."""

    lies: Mapping[str, Lies]
    """By name; every shard has those tensors that are not named."""
    parts: Sequence[Layout]
    """Of each shard."""
    copies: int = 1
    """How many columns have them."""


@dataclass(frozen=True)
class ByParts:
    """A of the parts of all workers of a replica.

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
        each = gathered(self.mine, dict(self._sources()), self.rank, self.traffic, wanted=wanted)
        if each is None:
            return None
        found, rest = self.whole.new(), iter(each)
        named = [[dict(next(rest).named()) for _ in stage.parts] for stage in self.stages]
        for name, view in found.named():
            held = next((s, own) for s, own in zip(self.stages, named, strict=True) if any(name in p for p in own))
            view.copy_(_whole(name, *held))
        return found

    def _sources(self) -> Iterator[tuple[int, Layout]]:
        """Who tell of their parts: of the first replica, whose ranks come first, the first column of each stage."""
        start = 0
        for stage in self.stages:
            yield from enumerate(stage.parts, start)
            start += stage.copies * len(stage.parts)


def _whole(name: str, stage: Divided, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    how = stage.lies.get(name)
    if isinstance(how, Split):
        return how.put_together([part[name] for part in parts])
    return next(part[name] for part in parts if name in part)
