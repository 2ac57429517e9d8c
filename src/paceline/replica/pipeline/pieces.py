"""What runs a part: all of it at once, or piece by piece, with each piece's activations forgotten in between.

::

    whole     keeps   | a b c d e f g h i |
    pieces    keeps   | a     | d     | g     |     in backward of a piece, those after its first are made again
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.replica.capture import Captured
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.header import Value
from paceline.replica.pipeline.units import group
from paceline.replica.saved import Tally

Again: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Called in a forward pass: the context in which it is made again."""


class Body(ABC):
    """A part as it is run."""

    @property
    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """What is called, for functions to be replaced in."""

    @abstractmethod
    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        """The part's forward.

        Args:
            given: inputs and what was received.
            tally: where shapes are new: is told what is kept that autograd does not save.
        """


@final
class Whole(Body):
    """All at once."""

    def __init__(self, part: Part) -> None:
        self._module = part.module

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self._module]

    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:  # noqa: ARG002
        found: Sequence[Value] = self._module(*given)
        return found


@final
class Pieces(Body):
    """√n pieces of equally many units: what is kept for n of them is then least (Chen et al. 2016, arXiv 1604.06174).

    Args:
        part: any.
        captured: what it was cut from.
        running: its buffers that training changes; what is made again leaves them as they are.
    """

    def __init__(self, part: Part, captured: Captured, running: Sequence[Tensor]) -> None:
        self._cut = in_pieces(part, captured)
        self._running = running
        self.again: Again = nullcontext

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [piece.module for piece in self._cut.parts]

    def run(self, given: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        values: dict[str, Value] = {}
        made: Sequence[Value] = ()
        for piece in self._cut.parts:
            taken = [given[index] for index in piece.inputs] + [values[crossing.name] for crossing in piece.received]
            if tally is not None:
                tally.add_all(taken)
            made = self._piece(piece, taken, tally)
            values.update((crossing.name, value) for crossing, value in zip(piece.sent, made, strict=False))
        return made

    def _piece(self, piece: Part, taken: Sequence[Value], tally: Tally | None) -> Sequence[Value]:
        if tally is not None:  # to be measured, it is kept this once
            with tally.passing():
                return piece.module(*taken)  # type: ignore[no-any-return]
        return checkpoint(piece.module, *taken, use_reentrant=False, context_fn=self._contexts)  # type: ignore[no-any-return]

    def _contexts(self) -> tuple[Any, Any]:
        """Of the first time, and of when it is made again."""
        return nullcontext(), _undone(self.again(), self._running)


@contextmanager
def _undone(context: AbstractContextManager[None], buffers: Sequence[Tensor]) -> Iterator[None]:
    """The context, after which buffers are as they were."""
    with ExitStack() as stack:
        stack.enter_context(context)
        stack.enter_context(keeping(buffers))
        yield


@contextmanager
def keeping(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Whatever is written into them while it is entered, they are then as they were."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Not seen by autograd: a BatchNorm has saved it, though its backward does not read it (torch 2.13).
            buffer.data.copy_(value)


def in_pieces(part: Part, captured: Captured) -> Cut:
    """A part cut as a model is."""
    units = group(replace(captured, module=part.module))
    count = len(units.groups)
    pieces = max(1, math.isqrt(count))
    return cut(units, [count * k // pieces for k in range(1, pieces)])
