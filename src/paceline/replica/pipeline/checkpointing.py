"""Activation checkpointing of a part: run piece by piece, with each piece's activations recomputed in backward.

::

    whole     keeps   | a b c d e f g h i |
    pieces    keeps   | a     | d     | g     |     in backward of a piece, those after its first are computed again
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.replica.activation_memory import StorageCounter
from paceline.replica.capture.capture import Captured
from paceline.replica.pipeline.cut import Part, cut
from paceline.replica.pipeline.cut_groups import group
from paceline.replica.pipeline.p2p_queue import Value

# Called in a forward pass; returns the context in which it will be run again.
RecomputeContext: TypeAlias = Callable[[], AbstractContextManager[None]]


class CheckpointedPart:
    """A part in √n pieces of equally many units: what is kept of n is then least (Chen et al. 2016, arXiv 1604.06174).

    Args:
        part: any.
        captured: the model that it was cut from.
        running: its buffers that training changes; recomputation leaves them as they are.
    """

    def __init__(self, part: Part, captured: Captured, running: Sequence[Tensor]) -> None:
        units = group(replace(captured, module=part.module))
        count = len(units.groups)
        pieces = max(1, math.isqrt(count))
        self._pieces = cut(units, [count * k // pieces for k in range(1, pieces)]).parts
        self.modules = [piece.module for piece in self._pieces]
        """The pieces' modules, in which operators may be replaced."""
        self._running = running
        self.recompute_context: RecomputeContext = nullcontext

    def run(self, arguments: Sequence[Value], counter: StorageCounter | None) -> Sequence[Value]:
        """Return the part's outputs.

        Args:
            arguments: the part's inputs, then its received values.
            counter: where shapes are new: counts the pieces' inputs, which autograd's hooks don't see, and as transient
                what a piece saves; the pieces are not checkpointed this once.
        """
        values: dict[str, Value] = {}
        outputs: Sequence[Value] = ()
        for piece in self._pieces:
            taken = [arguments[index] for index in piece.inputs] + [values[each.name] for each in piece.received]
            if counter is None:
                # Non-reentrant, so that all pieces and the portals before them are one graph.
                outputs = checkpoint(piece.module, *taken, use_reentrant=False, context_fn=self._contexts)
            else:
                counter.add(taken)
                with counter.counting_transient():
                    outputs = piece.module(*taken)
            values.update((crossing.name, value) for crossing, value in zip(piece.sent, outputs, strict=False))
        return outputs

    def _contexts(self) -> tuple[Any, Any]:
        """Return the contexts of the first run and of the recomputation."""
        recompute_context = self.recompute_context()  # taken now: it depends on the forward pass that goes on

        @contextmanager
        def again() -> Iterator[None]:
            with recompute_context, preserve_buffers(self._running):
                yield

        return nullcontext(), again()


@contextmanager
def preserve_buffers(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: the buffers' values are restored at its end."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Not seen by autograd: a BatchNorm has saved it, though its backward does not read it (torch 2.13).
            buffer.data.copy_(value)
