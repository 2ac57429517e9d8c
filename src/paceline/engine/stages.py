"""What can't be done with replicas of several stages, said before anything starts."""

from paceline.aggregation import Synchronous, text_of
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.strategy import Strategy


def refuse_stages(job: Job) -> None:
    """Raise InputError where a pipeline can't be had under this job's strategy."""
    strategy = job.strategy
    _refuse_shape(strategy)
    _refuse_policy(strategy)
    _refuse_options(strategy)
    if not strategy.order.flushes:
        _refuse_with_streams(job)
    strategy.order.refuse(strategy.stage_count, strategy.micro_batch_count)


def _refuse_shape(strategy: Strategy) -> None:
    if max(strategy.stage_workers) > 1:
        raise InputError(
            f"stages={list(strategy.stage_workers)}: several workers for a stage are not built yet; write "
            f"stages={strategy.stage_count}"
        )
    if strategy.replicas > 1:
        raise InputError(
            f"replicas={strategy.replicas} × stages={strategy.stage_count}: replicas of pipelines are not built yet; "
            "write replicas=1"
        )


def _refuse_policy(strategy: Strategy) -> None:
    policy, stages = strategy.aggregation, strategy.stage_count
    if isinstance(policy.delta, InPlace):
        raise InputError(
            f"aggregation={text_of(policy)}: replicas write one A in place, step by step, but of stages={stages} each "
            "has a part of A of its own; write aggregation=synchronous"
        )
    if not isinstance(policy, Synchronous) or policy.backups:
        raise InputError(
            f"aggregation={text_of(policy)} over stages={stages}: asynchronous pipelines are not built yet; write "
            "aggregation=synchronous"
        )


def _refuse_options(strategy: Strategy) -> None:
    for name in ("compression", "shard_optimizer", "shard_parameters"):
        value = getattr(strategy, name)
        if value not in (None, False, "none"):
            raise InputError(
                f"{name}={value} is about what whole replicas send each other, but stages={strategy.stage_count} of "
                f"one replica send activations alone; leave {name} out"
            )


def _refuse_with_streams(job: Job) -> None:
    """What needs the weights to stay as they are until the whole gradient is known."""
    strategy, program = job.strategy, job.program
    schedule = f"schedule={strategy.schedule}"
    if strategy.order.updates_each and strategy.micro_batch_count > 1:
        raise InputError(
            f"{schedule} makes an update of each micro-batch, so micro_batches={strategy.micro_batches} of them are as "
            "many batches; write micro_batches=1 and a smaller batch_size=, or schedule=pipedream-2bw"
        )
    if strategy.device != "cpu":
        raise InputError(
            f"device={strategy.device}: NCCL carries what two stages send each other in one order, but under "
            f"{schedule} each goes on before the other is given the next batch; write device=cpu, or schedule=1f1b"
        )
    moves = f"but under {schedule} each stage moves its weights before the others have their gradients"
    if program.clip_norm is not None:
        raise InputError(
            f"clip_norm={program.clip_norm} scales a gradient by the norm of all of it, {moves}; write clip_norm=None, "
            "or schedule=1f1b"
        )
    if job.on_nonfinite == "skip":
        raise InputError(
            f"on_nonfinite='skip' discards a gradient of which any part is not finite, {moves}; write "
            "on_nonfinite='stop', or schedule=1f1b"
        )
    if strategy.accumulate > 1:
        raise InputError(
            f"accumulate={strategy.accumulate} makes one update of several batches, but under {schedule} each batch is "
            "one; write accumulate=1 and a larger batch_size="
        )
    if strategy.batchnorm == "mini-batch":
        raise InputError(
            f"batchnorm=mini-batch waits for the end of a mini-batch, but under {schedule} the next one begins before "
            "that; write batchnorm=micro-batch"
        )
