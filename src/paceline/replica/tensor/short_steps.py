"""A shard's forward and backward as one list of operators, where steps are short: without Python, without autograd.

All shards of a replica decide alike, or one would wait for collectives that another does not make::

    some steps as they are     each shard: how long they take
    agreed                     the slowest is short: each traces its own      (else steps stay as they are)
    agreed                     all could: compared with the steps as they are (else ...)
    agreed                     all are the same bits: from now on graphs      (else ...)

Operators and collectives are those of the shard as it is, in its order, so results have the same bits.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.replica.capture.verify import check, model_runs
from paceline.replica.module_utils import add_gradients, preserve_state, tensors_of
from paceline.replica.operator_list import as_it_is, tracer_import
from paceline.replica.step_graph import MOST, Differentiated, StepGraph, form_of, traced_step
from paceline.replica.tensor.graph_collectives import GraphCollectives
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.schedule.base import SHORT_PASS_S

# Of what Python and autograd take, about a millisecond, little is left of a longer step; backward takes two forwards.
SHORT_STEP_S: Seconds = 3 * SHORT_PASS_S

# Seconds of steps of one form before it is traced, which takes about as long: a short run is not held up.
WARM_S: Seconds = 0.1

# Held by a thread that traces: it patches torch.
_TRACING = threading.Lock()


class ShardStep(NamedTuple):
    """A graph, and the collectives that it makes."""

    graph: StepGraph
    collectives: GraphCollectives


class Made(NamedTuple):
    """Steps of one form that were made without a graph.

    Args:
        number: of them.
        seconds: of all.
        shortest: of one.
    """

    number: int = 0
    seconds: Seconds = 0.0
    shortest: Seconds = math.inf


@final
class ShortSteps:
    """The graphs of a shard, for those forms of batches with which its steps are short and many.

    Args:
        module: the shard, in training mode: leaves of a batch -> (loss or its own term of it,).
        shards: the group.
        autocast: makes the context of a forward pass.
        uncounted: makes a context in which what is sent is no part of training.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: TPCollectives,
        autocast: Callable[[], AbstractContextManager[Any]],
        uncounted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module, self._shards, self._autocast, self._uncounted = module, shards, autocast, uncounted
        self._named = tensors_of(module)
        self._tensors = list(self._named.values())
        self._weight, self._weight_tensor = 1.0, torch.ones(())
        """The gradient of the loss, as a number and as a tensor."""
        self.steps: dict[Hashable, ShardStep | None] = {}
        """By form of batch; None: it has no graph."""
        self._made: dict[Hashable, Made] = defaultdict(Made)

    def of(self, leaves: Sequence[Tensor]) -> tuple[Hashable, ShardStep | None]:
        """Return the form of a batch and the graph for it, None: its step is made as it is; all shards call it."""
        form = form_of(leaves)
        if form in self.steps or len(self.steps) == MOST:
            return form, self.steps.get(form)
        number, seconds, shortest = self._made[form]
        if number < 2 or number.bit_count() > 1:  # agreed on after 2, 4, 8, ...
            return form, None
        early = seconds < WARM_S or (shortest <= SHORT_STEP_S and tracer_import().is_alive())
        with self._uncounted():
            slowest, too_early = self._largest(shortest, float(early))
            if slowest > SHORT_STEP_S:
                self.steps[form] = None
            elif not too_early:
                self.steps[form] = self._checked(leaves)
        return form, self.steps.get(form)

    def passed(self, form: Hashable, seconds: Seconds) -> None:
        """Note a step without a graph."""
        before = self._made[form]
        self._made[form] = Made(before.number + 1, before.seconds + seconds, min(before.shortest, seconds))

    def differentiate(self, step: ShardStep, leaves: Sequence[Tensor], weight: float) -> tuple[Tensor, Nanoseconds]:
        """Add the gradient of ``weight`` · loss to the parameters' ``grad``; all shards call it.

        Returns:
            What the shard returns, and when its forward pass had ended.
        """
        loss, *gradients = self._run(step, leaves, weight)
        add_gradients(step.graph.parameters, gradients)
        return loss, step.collectives.turned_ns

    def _run(self, step: ShardStep, leaves: Sequence[Tensor], weight: float = 1.0) -> Sequence[Tensor]:
        if weight != self._weight:
            self._weight = weight
            self._weight_tensor.fill_(weight)
        graph, collectives = step
        collectives.error = None
        # Not under no_grad, where some operators keep nothing for the backward that is called after them.
        with torch._C._AutoDispatchBelowAutograd():
            try:
                return graph.operators(*self._tensors, *leaves, self._weight_tensor, *graph.constants)
            except Exception:
                if collectives.error is not None:
                    raise collectives.error from None  # its own traceback says where
                raise

    def _largest(self, *numbers: float) -> list[float]:
        """Return the largest number of all shards, of each; all of them call it together."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        found: list[float] = self._shards.all_reduce(tensor, "how long a step takes", largest=True).tolist()
        return found

    def _checked(self, leaves: Sequence[Tensor]) -> ShardStep | None:
        """Return the graph for a batch, compared with the shard as it is; all shards get one, or none of them."""
        step: ShardStep | None = None
        try:
            step = self._traced(leaves)
        except Exception:  # whatever torch raises where it can't trace; the shard as it is is right in any case
            step = None
        if any(self._largest(float(step is None))):
            return None
        assert step is not None, "no shard has failed"

        def run(inputs: Sequence[Tensor]) -> tuple[Tensor]:
            return (Differentiated.apply(partial(self._run, step), inputs, *step.graph.parameters),)  # type: ignore[no-untyped-call]

        inputs, differs = tuple(leaves), False
        try:
            with self._autocast():
                expected = model_runs(self._module, inputs, (), of_inputs=False)
            check(
                self._module, run, partial(tensors_of, self._module), inputs, samples=(), of_inputs=False, runs=expected
            )
        except InputError:
            differs = True
        return None if any(self._largest(float(differs))) else step

    def _traced(self, leaves: Sequence[Tensor]) -> ShardStep:
        """Trace a step, and make it once without the others."""
        collectives, module = GraphCollectives(self._shards), self._module

        def loss_of(own: Any, given: Sequence[Tensor]) -> Tensor:
            with self._autocast():
                loss: Tensor = torch.func.functional_call(module, dict(own), tuple(given))[0]
            collectives.turn(loss.detach())
            return loss

        with _TRACING, preserve_state(module), collectives.tracing(module):
            step = ShardStep(traced_step(loss_of, self._named, leaves, self._weight_tensor), collectives)
            collectives.alone = True
            with as_it_is():
                self._run(step, leaves)
            collectives.alone = False
        return step
