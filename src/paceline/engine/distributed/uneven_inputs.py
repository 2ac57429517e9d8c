"""Shadow passes: a rank without samples still runs forward and backward, so that collectives match (torch's ``Join``).

Layers that communicate in every pass (:mod:`~paceline.engine.distributed.sync_batchnorm`), or whose parameters are
gathered from all ranks (:mod:`~paceline.engine.distributed.fsdp`), would wait for ever for a rank whose last batch
is empty, or whose replica has left. Such a rank runs the pass on any batch and contributes nothing to the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from paceline.core.types import Clock, ReplicaId
from paceline.engine.distributed.fsdp import FsdpModule
from paceline.engine.distributed.sync_batchnorm import BatchNormGroup, SynchronisedBatchNorm
from paceline.engine.run_context import RunContext
from paceline.program import call, map_tree
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.batches import BatchSource
from paceline.replica.flat_state import FlatState


class ShadowPasses:
    """The passes of one rank since the last exchange, and the shadow passes that make up for missing ones.

    Args:
        context: of the run.
        replica: of this rank.
        module: the model.
        communicating: what communicates in each pass: the ranks of its BatchNorm layers, parameters that are gathered.
    """

    def __init__(
        self,
        context: RunContext,
        replica: ReplicaId,
        module: nn.Module,
        communicating: Sequence[BatchNormGroup | FsdpModule],
    ) -> None:
        self._context, self._replica, self._module, self._communicating = context, replica, module, communicating
        # A sharded gradient is the sum of all ranks', to which a shadow pass adds the other ranks' contributions.
        sharded = any(isinstance(each, FsdpModule) for each in communicating)
        self._gradients = [] if sharded else list(module.parameters())
        self.count = 0
        """Passes since the last exchange."""

    def catch_up(self, passes: int) -> None:
        """Run as many passes before this exchange as the other ranks do."""
        for _ in range(passes - self.count):
            self.run()
        self.count = 0

    def run(self) -> None:
        """Run one pass without any effect on this rank: gradients, buffers and random numbers stay as they are."""
        self.count += 1
        gradients = [p.grad for p in self._gradients]
        layers = [m for m in self._module.modules() if not isinstance(m, SynchronisedBatchNorm)]
        buffers = [b for m in layers for b in m.buffers(recurse=False)]
        kept = [b.clone() for b in buffers]
        for each in self._communicating:
            each.absent = True
        try:
            program, device = self._context.job.program, self._context.device(self._replica)
            inputs, targets = (map_tree(lambda t: t.to(device), x) for x in (self._batch.input, self._batch.target))
            with program.autocast(device):
                loss = program.loss(call(self._module, inputs), targets)
            loss.backward()
        finally:
            for each in self._communicating:
                each.absent = False
            for parameter, gradient in zip(self._gradients, gradients, strict=True):
                parameter.grad = gradient
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)

    @cached_property
    def _batch(self) -> Batch:
        """The first batch with samples; it is read without the loader's own workers."""
        job = self._context.job
        return BatchSource(job.program.without_workers(), self._context.order, self._context.replicas).first()


@dataclass
class ShadowReplica(Replica):
    """A replica that runs a shadow pass where its batch is empty."""

    _inner: Replica
    _passes: ShadowPasses

    def adopt(self, state: FlatState) -> None:
        self._inner.adopt(state)

    def advance(self, batch: Batch, clock: Clock) -> float:
        if batch.samples:
            self._passes.count += 1
        else:
            with torch.random.fork_rng(devices=[]):
                self._passes.run()
        return self._inner.advance(batch, clock)

    def finish(self, out: FlatState) -> Measured:
        return self._inner.finish(out)
