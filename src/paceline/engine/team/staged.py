"""What computes Δ on one rank of a pipeline."""

from paceline.engine.team.pipeline import Pipeline
from paceline.replica.pipeline.runtime import Pipelined
from paceline.replica.tensor.shared import SharedTerms
from paceline.trace.recorder import AnyRecorder


def pipelined(pipeline: Pipeline, micro_steps: int, recorder: AnyRecorder) -> Pipelined:
    """A rank's part of a replica.

    Args:
        pipeline: as this rank sees it.
        micro_steps: batches of one Δ.
        recorder: of this rank's spans.
    """
    strategy, shared = pipeline.setup.job.strategy, None
    if pipeline.shards is not None:
        pipeline.shards.recorder = recorder
        shared = SharedTerms(pipeline.shards, pipeline.layout, pipeline.shared)
    return Pipelined(
        pipeline.setup.job.program,
        pipeline.plan(),
        pipeline.cut.captured,
        pipeline.parts,
        pipeline.seat(),
        pipeline.wire(),
        pipeline.layout,
        recorder=recorder,
        micro_steps=micro_steps,
        recompute=strategy.recompute,
        batchnorm=strategy.batchnorm,
        shared=shared,
        copies=pipeline.copies,
    )
