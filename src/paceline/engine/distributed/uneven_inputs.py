"""Forward and backward passes that a rank makes without a sample of its own, for the others' sake.

Layers that communicate in every pass (:mod:`~paceline.engine.distributed.sync_batchnorm`), or whose parameters are
gathered from all ranks (:mod:`~paceline.engine.distributed.fsdp`), would wait for ever for a rank whose last batch
is empty, or whose replica has left. It makes the pass all the same, on any batch, and brings nothing to what is summed.
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.core.types import Clock, ReplicaId
from paceline.engine.distributed.fsdp import FsdpModule
from paceline.engine.distributed.sync_batchnorm import BatchNormGroup, SynchronisedBatchNorm
from paceline.engine.run_context import RunContext
from paceline.program import call, map_tree
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.batches import stream
from paceline.replica.flat_state import FlatState


class ShadowPasses:
    """One rank's passes, counted.

    Args:
        setup: of the run.
        replica: of this rank.
        module: whose layers meet.
        with_whom: the ranks that they meet; None: they meet nobody.
        divided: the parameters, where all ranks have to gather them; None: this one has them.
    """

    def __init__(
        self,
        setup: RunContext,
        replica: ReplicaId,
        module: nn.Module,
        with_whom: BatchNormGroup | None,
        divided: FsdpModule | None = None,
    ) -> None:
        self._setup, self._replica, self._module = setup, replica, module
        self._meeting, self._divided = with_whom, divided
        self._needed = with_whom is not None or divided is not None
        self.made = 0
        """Passes since the last exchange."""

    def keep_up(self, passes: int) -> None:
        """Make as many passes before this exchange as the others do."""
        for _ in range(passes - self.made if self._needed else 0):
            self.attend()
        self.made = 0

    def attend(self) -> None:
        """One pass that leaves nothing of this rank's behind."""
        self.made += 1
        if not self._needed:
            return
        # A divided gradient is the sum of all ranks', to which this pass adds what the others bring.
        parameters = list(self._module.parameters()) if self._divided is None else []
        gradients, buffers = [p.grad for p in parameters], self._others()
        kept = [b.clone() for b in buffers]
        self._be_absent(absent=True)
        try:
            self._pass()
        finally:
            self._be_absent(absent=False)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)

    def _be_absent(self, *, absent: bool) -> None:
        for what in (self._meeting, self._divided):
            if what is not None:
                what.absent = absent

    def _pass(self) -> None:
        program, device = self._setup.job.program, self._setup.device(self._replica)
        inputs, targets = (map_tree(lambda t: t.to(device), x) for x in (self._batch.input, self._batch.target))
        with program.autocast(device):
            loss = program.loss(call(self._module, inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]

    @cached_property
    def _batch(self) -> Batch:
        job = self._setup.job
        plain = replace(job.program, loader={k: v for k, v in job.program.loader.items() if k == "collate_fn"})
        batches = stream(plain, self._setup.order, 0, self._setup.replicas)
        return next(batch for batch in batches if batch.samples)

    def _others(self) -> list[Tensor]:
        """The running buffers of all layers that meet nobody."""
        modules = [m for m in self._module.modules() if not isinstance(m, SynchronisedBatchNorm)]
        return [b for m in modules for b in m.buffers(recurse=False)]


class ShadowReplica(Replica):
    """A replica that makes a pass also where its batch is empty."""

    def __init__(self, inner: Replica, attendance: ShadowPasses) -> None:
        self._inner, self._attendance = inner, attendance

    def adopt(self, state: FlatState) -> None:
        self._inner.adopt(state)

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            with torch.random.fork_rng(devices=[]):
                self._attendance.attend()
        else:
            self._attendance.made += 1
        return self._inner.advance(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        return self._inner.finish(out)
