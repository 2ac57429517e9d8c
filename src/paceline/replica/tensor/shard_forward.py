"""Forward passes without backward: by all shards together, or by the first alone with the whole model.

::

    first pass of a size    the whole model, the shards, the whole model ... -> the quicker way, agreed by all
    every other pass        shards: parts, collectives      or    first shard: the whole model; the others: nothing

What shards save of a small pass is less than what their collectives take.
"""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import final

from torch import nn

from paceline.core.types import Seconds
from paceline.program import Tree, call, leaves
from paceline.replica.capture.capture import Captured
from paceline.replica.capture.input_spec import Shapes, shapes_of
from paceline.replica.tensor.prepare import GatherText
from paceline.replica.tensor.rewrite import ShardGraph

# Passes of each kind, by turns; the median counts, for the fastest one of shards is that in which none had to wait. Of
# short ones as many more, up to MOST, as there is time for: what disturbs one of them lasts for many.
FEWEST, MOST = 5, 100
TIMED_S: Seconds = 0.1

# What shards together may take of the whole model's time at most: less is won than what they lose by waiting for each
# other where another program runs.
PAYS = 0.9


@final
class ShardForward:
    """The forward pass of one shard; all shards call it together, with the same input.

    Args:
        captured: the model's graph.
        shard: this shard of it.
        whole: the model; None: the shards always pass together.
        gather: gathers a text of each shard.
        rank: of this shard.
    """

    def __init__(
        self, captured: Captured, shard: ShardGraph, whole: nn.Module | None, gather: GatherText, rank: int
    ) -> None:
        self._captured, self._shard, self._whole = captured, shard.module, whole
        self._gather, self._rank = gather, rank
        self.divides: dict[Shapes, bool] = {}
        """Whether shards pass together, by the input's shapes."""

    def __call__(self, inputs: Tree) -> Tree:
        """Return the model's output, whole on the first shard; on others perhaps nothing.

        Raises:
            InputError: the input has another form than the graph was captured for.
        """
        if self._whole is None:
            return self._together(inputs)
        shapes = shapes_of(leaves(inputs))
        if shapes not in self.divides:
            self._captured.flatten(inputs)  # raises on all shards
            self.divides[shapes] = self._pays(self._whole, inputs)
        if self.divides[shapes]:
            return self._together(inputs)
        return () if self._rank else call(self._whole, inputs)

    def _together(self, inputs: Tree) -> Tree:
        return self._captured.rebuild(self._shard(*self._captured.flatten(inputs)))

    def _pays(self, whole: nn.Module, inputs: Tree) -> bool:
        """Return whether the shards together are quicker than the first with the whole model."""
        together_s, alone_s = self._median_s(whole, inputs, FEWEST)
        passes = min(MOST, int(TIMED_S / max(together_s, alone_s)))
        if passes > FEWEST:
            together_s, alone_s = self._median_s(whole, inputs, passes)
        return together_s < PAYS * alone_s

    def _median_s(self, whole: nn.Module, inputs: Tree, passes: int) -> tuple[Seconds, Seconds]:
        """Return the seconds of the slowest shard's median pass, and of the whole model's; the same on all shards."""
        alone, together = list[Seconds](), list[Seconds]()
        for _ in range(passes):
            self._gather("", "the others' forward pass")
            if not self._rank:
                alone.append(_seconds(lambda: call(whole, inputs)))
            self._gather("", "the forward pass of the whole model")
            together.append(_seconds(lambda: self._together(inputs)))
        own = [median(together), median(alone or [0.0])]
        gathered = [json.loads(each) for each in self._gather(json.dumps(own), "how long a forward pass takes")]
        return max(float(seconds) for seconds, _ in gathered), float(gathered[0][1])


def _seconds(forward: Callable[[], Tree]) -> Seconds:
    """Time the second of two passes: the first one fills the caches."""
    forward()
    began = time.perf_counter()
    forward()
    return time.perf_counter() - began
