"""Short steps of a whole model as graphs by default: where nothing could tell them from steps as they are.

::

    steps as they are     how long they take
    short, and a few      traced, and compared with the model on this batch     differs, or can't be traced: as they are
    the next batch        compared once more                                    differs: as they are
    from then on          graphs: the same operators in the same order, the same bits

Of a short step Python and autograd are a third or more. A model that is not pure
(:mod:`~paceline.replica.pure_forward`) has no graph unless ``compile=graph`` asks for one: somebody has to know what
its Python decides.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.device import CPU
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.flat_state import FlatState
from paceline.replica.module_utils import preserve_state
from paceline.replica.operator_list import PlainSteps
from paceline.replica.pure_forward import Setting, pure
from paceline.replica.step_graph import MOST, StepGraphs, form_of

SHORT_STEP_NS: Final[Nanoseconds] = 2_000_000
"""A micro-step that is shorter may be a graph, and is computed to its end where it is cancelled."""


class ShortStepGraphs(StepGraphs):
    """The graphs of a pure model, for those forms of batches with which its steps are short and many.

    Args:
        program: gives the loss, and the precision.
        module: the model, in training mode.
        device: of the model.
        after_s: time of steps of one form before it is traced.
        reads: what forward and loss read from outside; while one has another value, all steps are as they are.
        delta: as :class:`StepGraphs`.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        device: torch.device,
        after_s: Seconds,
        reads: Sequence[Setting] = (),
        delta: Callable[[], FlatState] | None = None,
    ) -> None:
        super().__init__(program, module, device, delta)
        self._after_s, self._reads = after_s, reads
        self._made: dict[Hashable, PlainSteps] = defaultdict(PlainSteps)
        self._as_they_are: set[Hashable] = {None}
        """Forms whose steps have no graph, and will have none; None stands for those that can't be told apart."""
        self._form: Hashable = None
        self._began: Nanoseconds = 0

    @classmethod
    def of(
        cls,
        program: Program,
        module: nn.Module,
        device: torch.device,
        after_s: Seconds,
        delta: Callable[[], FlatState] | None = None,
    ) -> "ShortStepGraphs | None":
        """Return them for a model; None: it is not pure, or not on the CPU."""
        reads = pure(module, program.loss) if device == CPU else None
        return None if reads is None else cls(program, module, device, after_s, reads, delta)

    def undecided(self, batch: Batch) -> bool:
        """Return whether a step on such a batch may yet become a graph, or is to be compared."""
        form = _form_of(batch.input, batch.target)
        graph = self._graphs.get(form)
        return form not in self._as_they_are and (graph is None or graph.compared < 2)

    def check_new(self, batch: Batch) -> None:
        """Trace, or compare once more, where it is time for that; what can't be a graph stays as it is."""
        form = _form_of(batch.input, batch.target)
        if not self._may_be_graph(form):
            return
        if form not in self._graphs:
            _, seconds, shortest = self._made[form]
            if seconds <= self._after_s:  # the first step is never a graph's
                return
            if shortest * 1e9 >= SHORT_STEP_NS or len(self._graphs) == MOST:
                self._as_they_are.add(form)
                return
        try:
            self.check(batch)
        except Exception:  # whatever torch raises where it can't trace; the model itself is right in any case
            self._graphs.pop(form, None)
            self._as_they_are.add(form)

    def differentiate(self, inputs: Tree, target: Tree, weight: float) -> Tensor | None:
        form = _form_of(inputs, target)
        if self._may_be_graph(form):
            try:
                if (loss := self._differentiate(form, inputs, target, weight)) is not None:
                    return loss
            except RuntimeError:
                self._raise_as_it_is(inputs, target)
                raise
        self._form, self._began = form, time.monotonic_ns()
        return None

    def made(self, now: Nanoseconds) -> None:
        if self._form not in self._as_they_are:
            self._made[self._form] = self._made[self._form].with_one((now - self._began) * 1e-9)

    def _may_be_graph(self, form: Hashable) -> bool:
        return form not in self._as_they_are and all(each.unchanged for each in self._reads)

    def _raise_as_it_is(self, inputs: Tree, target: Tree) -> None:
        """Make the step as it is, for what it raises: of its own type, and from the line of the model."""
        with preserve_state(self._module), self._program.autocast(str(self._device)):
            loss = self._program.loss(call(self._module, inputs), target)
        loss.backward()


def _form_of(inputs: Tree, target: Tree) -> Hashable:
    """Return the form of a batch; None: there is something in it of which nobody knows."""
    try:
        return form_of((inputs, target))
    except InputError:
        return None
