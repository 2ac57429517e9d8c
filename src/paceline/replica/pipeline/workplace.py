"""What one worker of a pipeline works with: its parts made ready, their tensors, and its side of each micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.types import ReplicaId
from paceline.program import Program
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch
from paceline.replica.capture import Captured
from paceline.replica.pipeline.base import Part
from paceline.replica.pipeline.copies import Copies
from paceline.replica.pipeline.messages import Plan
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches
from paceline.replica.pipeline.stages import Batchnorm, Recompute, Workshop, make_stages
from paceline.replica.pipeline.tensors import together
from paceline.replica.saved import Holdings
from paceline.replica.state import Layout


@dataclass(frozen=True, slots=True)
class Seat:
    """Which worker of which replica, and on what device."""

    replica: ReplicaId
    worker: int
    device: str = "cpu"


class Workplace:
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
        plan: Plan,
        captured: Captured,
        parts: Sequence[Part],
        seat: Seat,
        layout: Layout,
        *,
        recompute: Recompute,
        batchnorm: Batchnorm = "micro-batch",
        copies: Copies | None = None,
    ) -> None:
        for part in parts:
            part.module.to(seat.device).train()
        self.tensors = Autograd(program, together(parts), layout, seat.replica, seat.device)
        self.holdings = Holdings()
        last = plan.schedule.parts(plan.stages) - 1
        workshop = Workshop(
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
