"""Forward passes without backward: by all shards together, or by the first alone with the whole model.

::

    first pass of a size    one by the whole model, one by the shards, again ... -> the quicker one, agreed by all
    every other pass        shards: parts, collectives         or    first shard: the whole model; the others: nothing

What shards save of a small pass is less than what their collectives take.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from torch import Tensor

from paceline.core.types import Seconds
from paceline.replica.capture.input_spec import Shapes, shapes_of
from paceline.replica.tensor.prepare import GatherText

# Leaves of the input -> leaves of the output.
Forward: TypeAlias = Callable[..., Sequence[Any]]

# Passes of each, of which the fastest counts: whatever else the machine does only makes one slower.
REPEATS = 5


@final
class ShardForward:
    """The forward pass of one shard; all shards call it together, with the same input.

    Args:
        divided: this shard's part of the pass; the output is whole.
        whole: the whole model's; None: the shards always pass together.
        gather: gathers a text of each shard.
        rank: of this shard.
    """

    def __init__(self, divided: Forward, whole: Forward | None, gather: GatherText, rank: int) -> None:
        self._divided, self._whole, self._gather, self._rank = divided, whole, gather, rank
        self.divides: dict[Shapes, bool] = {}
        """Whether shards pass together, by the input's shapes."""

    def __call__(self, *leaves: Tensor) -> Sequence[Any]:
        """Return the leaves of the output, whole on the first shard; on others perhaps none."""
        whole = self._whole
        if whole is None:
            return self._divided(*leaves)
        shapes = shapes_of(leaves)
        if shapes not in self.divides:
            self.divides[shapes] = self._pays(whole, leaves)
        if self.divides[shapes]:
            return self._divided(*leaves)
        return () if self._rank else whole(*leaves)

    def _pays(self, whole: Forward, leaves: Sequence[Tensor]) -> bool:
        """Return whether the shards together are quicker than the first with the whole model, which has the cores."""
        alone, together = [], []
        for _ in range(REPEATS):
            self._gather("", "the others' forward pass")
            if not self._rank:
                alone.append(_seconds(whole, leaves))
            self._gather("", "the forward pass of the whole model")
            together.append(_seconds(self._divided, leaves))
        own = [min(together), min(alone, default=0.0)]
        gathered = [json.loads(each) for each in self._gather(json.dumps(own), "how long a forward pass takes")]
        return bool(max(seconds for seconds, _ in gathered) < gathered[0][1])


def _seconds(forward: Forward, leaves: Sequence[Tensor]) -> Seconds:
    began = time.perf_counter()
    forward(*leaves)
    return time.perf_counter() - began
