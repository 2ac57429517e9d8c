"""Weight stashing: one worker's weights after each of its updates, as long as somebody needs them.

::

    version     3             4             5
    weights   | vectors | -> | vectors | -> | vectors |     an update writes its result into vectors that are free
                ^ micro-batch 5, in flight    ^ newest

A parameter is pointed at the version that a pass needs before that pass. Backward needs that too: of a parameter itself
autograd keeps no values, but the parameter (torch 2.13); of a view of it, a transposed weight say, it keeps the values
where they lie, which are not written as long as the version is there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.types import Version
from paceline.replica.base import finite
from paceline.replica.state import State
from paceline.replica.stepper import Make, Stepper


class Versions:
    """One worker's, from version 0 on.

    Args:
        parameters: of the worker's parts, in the layout's order.
        start: their values at version 0, where they compute, without buffers; it is taken over.
        make: the optimizer.
        scheduler: stepped with it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        start: State,
        make: Make,
        scheduler: Callable[[Any], LRScheduler] | None,
    ) -> None:
        self._parameters, self._states = parameters, {0: start}
        self._spare: list[State] = []
        self._gradient = _like(start)
        self._stepper = Stepper(make, scheduler, start, self._gradient) if start.parameters else None
        self._used: Version | None = None
        self.newest: Version = 0
        self.most = 1
        """The most versions that were there at one time."""

    @property
    def state(self) -> State:
        """The newest version."""
        return self._states[self.newest]

    @property
    def optimizer_bytes(self) -> int:
        """Of what the optimizer remembers."""
        return 0 if self._stepper is None else self._stepper.nbytes

    def use(self, version: Version) -> None:
        """Let the parameters be those of a version."""
        if version != self._used:
            self._used = version
            for parameter, view in zip(self._parameters, self._states[version].views.parameters, strict=True):
                parameter.data = view

    def keep(self, in_flight: Collection[Version], since: Version) -> None:
        """Let go of what neither these need, nor what begins with version ``since`` or a later one."""
        unused = [v for v in self._states if v != self.newest and v < since and v not in in_flight]
        self._spare += [self._states.pop(version) for version in unused]

    def update(self, gradients: Sequence[Tensor], *, keeps: bool) -> bool:
        """Make the next version by one step of the optimizer; whether the gradients were finite.

        Args:
            gradients: one a parameter.
            keeps: whether the version that was newest is still needed; else it is written over.
        """
        before = self.state if keeps else self._states.pop(self.newest)
        there = (self._spare.pop() if self._spare else _like(before)) if keeps else before
        self.newest += 1
        self._states[self.newest] = there
        self.most = max(self.most, len(self._states))
        if self._stepper is None:
            return True
        with torch.no_grad():
            torch._foreach_copy_(self._gradient.views.parameters, list(gradients))
            self._stepper.step(self._gradient.parameters, out=there)
        return finite(self._gradient.parameters, 0.0)


def _like(state: State) -> State:
    return State(state.layout, [torch.empty_like(vector) for vector in state.parameters], [])
