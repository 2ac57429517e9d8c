"""A shard's forward and backward as one list of operators, where steps are short: without Python, without autograd.

All shards of a replica decide alike, or one would wait for collectives that another does not make::

    some steps as they are     each shard: how long they take
    agreed                     the slowest is short: each traces its own      (else steps stay as they are)
    agreed                     all could: compared with the steps as they are (else ...)
    agreed                     all are the same bits: from now on graphs      (else ...)

Operators and collectives are those of the shard as it is, in its order, so results have the same bits.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.replica.capture.verify import check, model_runs
from paceline.replica.module_utils import add_gradients, preserve_state, tensors_of
from paceline.replica.operator_list import WARM_S, PlainSteps, as_it_is
from paceline.replica.step_graph import MOST, Differentiated, StepGraph, form_of, traced_step
from paceline.replica.tensor.graph_collectives import GraphCollectives
from paceline.replica.tensor.prepare import PATCHING
from paceline.replica.tensor.tp_group import TPCollectives
from paceline.schedule.base import SHORT_PASS_S

# Python and autograd take 0.5 to 1.5 ms of a step, which is little of a longer one; backward takes two forwards.
SHORT_STEP_S: Seconds = 3 * SHORT_PASS_S


class ShardStep(NamedTuple):
    """A graph, and the collectives that it makes."""

    graph: StepGraph
    collectives: GraphCollectives


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
        self.steps: dict[Hashable, ShardStep | None] = {}
        """By form of batch; None: it has no graph."""
        self._made: dict[Hashable, PlainSteps] = defaultdict(PlainSteps)

    def differentiate(
        self, leaves: Sequence[Tensor], weight: float, plain: Callable[[], tuple[Tensor, Nanoseconds]]
    ) -> tuple[Tensor, Nanoseconds]:
        """Add the gradient of ``weight`` · loss to the parameters' ``grad``; all shards call it together.

        Args:
            leaves: of the batch.
            weight: of the loss.
            plain: does the same as the shard is, where there is no graph.

        Returns:
            What the shard returns, and when its forward pass had ended.
        """
        form = form_of(leaves)
        step = self.steps[form] if form in self.steps else self._agreed(form, leaves)
        if step is not None:
            loss, *gradients = self._run(step, leaves, weight)
            add_gradients(step.graph.parameters, gradients)
            return loss, step.collectives.turned_ns
        began = time.monotonic_ns()
        made = plain()
        self._made[form] = self._made[form].with_one((time.monotonic_ns() - began) * 1e-9)
        return made

    def _agreed(self, form: Hashable, leaves: Sequence[Tensor]) -> ShardStep | None:
        """Return the graph for a form that had none, once the shards agree that it is time; None: not yet, or never."""
        number, seconds, shortest = self._made[form]
        if len(self.steps) == MOST or number < 2 or number.bit_count() > 1:  # they look after 2, 4, 8, ... steps
            return None
        with self._uncounted():
            slowest, too_early = self._largest(shortest, float(seconds < WARM_S))
            if slowest > SHORT_STEP_S:
                self.steps[form] = None
            elif not too_early:
                self.steps[form] = self._checked(leaves)
        return self.steps.get(form)

    def _run(self, step: ShardStep, leaves: Sequence[Tensor], weight: float = 1.0) -> Sequence[Tensor]:
        graph, collectives = step
        collectives.error = None
        try:
            return graph.run(self._tensors, leaves, weight)
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
        with suppress(Exception):  # whatever torch raises where it can't trace; the shard as it is is right in any case
            step = self._traced(leaves)
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

        with PATCHING, preserve_state(module), collectives.tracing(module):
            collectives.alone = True
            step = ShardStep(traced_step(loss_of, self._named, leaves), collectives)
            with as_it_is():
                self._run(step, leaves)
            collectives.alone = False
        return step
