"""Build what one worker of a pipeline works with: its parts made ready, their tensors, its side of each micro-batch.

The parts that one worker holds, made ready for work.

What one worker of a pipeline works with: its parts made ready, their tensors, and its side of each micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from paceline.core.types import ReplicaId
from paceline.program import Program
from paceline.replica.activation_memory import Holdings
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured
from paceline.replica.flat_state import FlatLayout
from paceline.replica.module_utils import home
from paceline.replica.pipeline.base import Part, StageReplicaGroup
from paceline.replica.pipeline.batchnorm import Deferred
from paceline.replica.pipeline.comm_plan import CommPlan
from paceline.replica.pipeline.forward import Body, Checkpointed, Means, Whole
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches
from paceline.replica.pipeline.split_backward import OpReplacements, Splitter, substitute
from paceline.replica.pipeline.stage import Stage
from paceline.replica.single import Autograd


def merged_module(parts: Iterable[Part]) -> nn.Module:
    """A module without a forward that holds what the parts hold; a name that several have is one tensor from now on."""
    whole = nn.Module()
    for part in parts:
        for name, parameter in list(part.module.named_parameters()):
            _share(whole, part.module, name, parameter)
        for name, buffer in list(part.module.named_buffers()):
            _share(whole, part.module, name, buffer)
    return whole


def _share(whole: nn.Module, part: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    where = home(whole, path)
    if leaf in where._parameters or leaf in where._buffers:
        setattr(part.get_submodule(path), leaf, getattr(where, leaf))
    elif isinstance(tensor, nn.Parameter):
        where.register_parameter(leaf, tensor)
    else:
        where.register_buffer(leaf, tensor)


Recompute: TypeAlias = Literal["none", "boundaries", "all"]
Batchnorm: TypeAlias = Literal["micro-batch", "mini-batch"]


class StageBuilder:
    """Makes stages of parts.

    Args:
        program: says seed, precision and loss.
        captured: knows the model's output.
        last: the number of the last part.
        device: as torch writes it.
        layout: of the worker's tensors.
        recompute: see :class:`~paceline.replica.pipeline.stage.Stage`.
        batchnorm: whose statistics running ones are made of.
        splits: whether gradients of weights are put off.
        holdings: is told what is kept.
        copies: who take turns at the worker's stage; None: nobody else does.
    """

    def __init__(
        self,
        program: Program,
        captured: Captured,
        last: int,
        device: str,
        layout: FlatLayout,
        *,
        recompute: Recompute,
        batchnorm: Batchnorm,
        splits: bool,
        holdings: Holdings,
        copies: StageReplicaGroup | None = None,
    ) -> None:
        self._program, self._captured, self._last, self._device = program, captured, last, device
        self._recompute, self._batchnorm, self._splits = recompute, batchnorm, splits
        self._running = {entry.name for block in layout.buffers for entry in block.entries}
        self._holdings, self._copies = holdings, copies

    def stage(self, part: Part) -> Stage:
        """One part, at work; its module is changed in place."""
        buffers = {name: buffer for name, buffer in part.module.named_buffers() if name in self._running}
        rebuild = self._captured.rebuild if part.number == self._last else None
        running = list(buffers.values())
        body = self._body(part, running)
        splitter, deferred = self._splitter(body), self._deferred(body, buffers)
        if isinstance(body, Checkpointed) and splitter is not None:
            body.again = splitter.as_now
        means = Means(body, self._program, rebuild, self._device, splitter, deferred)
        forgets = self._recompute == "boundaries"
        return Stage(part, means, forgets=forgets, running=running, holdings=self._holdings)

    def _body(self, part: Part, running: Sequence[Tensor]) -> Body:
        return Checkpointed(part, self._captured, running) if self._recompute == "all" else Whole(part)

    def _splitter(self, body: Body) -> Splitter | None:
        if not self._splits:
            return None
        splitter = Splitter(self._device)
        return splitter if _substitute(body, splitter.substitutes) else None

    def _deferred(self, body: Body, buffers: dict[str, Tensor]) -> Deferred | None:
        if self._batchnorm != "mini-batch":
            return None
        counters = [buffer for name, buffer in buffers.items() if name.endswith("num_batches_tracked")]
        deferred = Deferred(counters, self._copies)
        return deferred if _substitute(body, deferred.substitutes) else None


def _substitute(body: Body, substitutes: OpReplacements) -> bool:
    found = [substitute(module, substitutes) for module in body.modules]
    return any(found)


def make_stages(workshop: StageBuilder, parts: Sequence[Part]) -> dict[int, Stage]:
    """By number."""
    return {part.number: workshop.stage(part) for part in parts}


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Which worker of which replica, and on what device."""

    replica: ReplicaId
    worker: int
    device: str = "cpu"


class StageRuntime:
    """One worker's.

    Args:
        program: says precision and loss.
        plan: the same on all workers of the replica.
        captured: what the parts were cut from; of it, only the forms of input and output are used.
        parts: those of this worker, ascending. Their modules are changed in place.
        seat: of this worker.
        layout: of the tensors of this worker's parts.
        recompute: what is made again during backward.
        batchnorm: whose statistics running ones are made of.
        copies: who take turns at this worker's stage; None: nobody else does.
    """

    def __init__(
        self,
        program: Program,
        plan: CommPlan,
        captured: Captured,
        parts: Sequence[Part],
        seat: WorkerId,
        layout: FlatLayout,
        *,
        recompute: Recompute,
        batchnorm: Batchnorm = "micro-batch",
        copies: StageReplicaGroup | None = None,
    ) -> None:
        for part in parts:
            part.module.to(seat.device).train()
        self.tensors = Autograd(program, merged_module(parts), layout, seat.replica, seat.device)
        self.holdings = Holdings()
        last = plan.schedule.parts(plan.stages) - 1
        workshop = StageBuilder(
            program,
            captured,
            last,
            seat.device,
            layout,
            recompute=recompute,
            batchnorm=batchnorm,
            splits=plan.schedule.splits_backward,
            holdings=self.holdings,
            copies=copies,
        )
        self.stages = make_stages(workshop, parts)
        self.takes_target = last in self.stages
        """Whether the loss is known here."""
        self._micro_batches, self._captured, self._device = plan.micro_batches, captured, torch.device(seat.device)
        self._takes = {leaf for part in parts for leaf in part.inputs}

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Those of a batch, on this worker's device as far as they are needed here."""
        cut = micro_batches(batch, self._micro_batches, self._captured.flat)
        if self._device.type == "cpu":
            return cut
        return [each.moved(str(self._device), self._takes, target=self.takes_target) for each in cut]
