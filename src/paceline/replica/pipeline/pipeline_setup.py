"""The record that describes one worker of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from paceline.core.types import ReplicaId
from paceline.program import Program
from paceline.replica.capture.capture import Captured
from paceline.replica.flat_state import FlatLayout
from paceline.replica.pipeline.base import P2P, NoP2P, Part, StageReplicaGroup
from paceline.replica.pipeline.comm_plan import CommPlan
from paceline.replica.single import NO_RECORDER
from paceline.trace.recorder import AnyRecorder

Recompute: TypeAlias = Literal["none", "boundaries", "all"]
BatchNormMode: TypeAlias = Literal["micro-batch", "mini-batch"]


@dataclass(frozen=True, slots=True)
class WorkerId:
    """A worker of a replica, and its device."""

    replica: ReplicaId
    worker: int
    device: str = "cpu"


@dataclass(frozen=True)
class PipelineSetup:
    """Everything that one worker of a pipeline is made of.

    Args:
        program: gives seed, precision, loss and, where the weights move in the pipeline, the optimizer.
        plan: the same on all workers of the replica.
        captured: the model that the parts were cut from; only its output's form is used.
        parts: those of this worker, ascending. Their modules are changed in place.
        worker: this worker.
        layout: of the tensors of this worker's parts.
        p2p: sends to and receives from the other workers of the replica.
        recorder: of this worker's spans.
        recompute: "none" keeps all that backward needs. "boundaries" keeps the inputs of a part, and runs its forward
            again before its backward: least is kept between the two. "all" cuts a part into √n pieces, keeps the inputs
            of each, and runs their forward passes again one by one during backward: more is kept between, but never all
            of a part at once. The same random numbers are drawn again; running buffers move once. Where a backward
            follows at once upon its forward, "boundaries" recomputes nothing.
        batchnorm: whether running statistics move with each micro-batch, or once, by those of the whole mini-batch.
        replicas: the replicas of this worker's stage; None: it is the only one.
    """

    program: Program
    plan: CommPlan
    captured: Captured
    parts: Sequence[Part]
    worker: WorkerId
    layout: FlatLayout
    p2p: P2P = field(default_factory=NoP2P)
    recorder: AnyRecorder = NO_RECORDER
    recompute: Recompute = "none"
    batchnorm: BatchNormMode = "micro-batch"
    replicas: StageReplicaGroup | None = None
