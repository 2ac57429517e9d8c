"""What can't be done with replicas of several workers, refused before anything starts.

What can't be done with replicas whose operators are divided, said before anything starts.

What can't be done with replicas of several stages, said before anything starts.

Where no rank has a whole Δ, or the whole sum, of which the norm could be told.
"""

from paceline.aggregation import Synchronous, text_of
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.strategy import Strategy


def refuse_pieces(job: Job) -> None:
    """Raise InputError where ``shard_optimizer=true`` can't be had under this job's strategy."""
    strategy = job.strategy
    if not strategy.shard_optimizer:
        return
    if strategy.compression != "none":
        raise InputError(
            f"shard_optimizer=True sends each rank its part of Δ, and compression={strategy.compression} all of it; "
            "leave one of them out"
        )
    if strategy.device != "cpu":
        raise InputError(
            f"shard_optimizer=True is carried between CPUs, not on device={strategy.device}; leave it out, or write "
            "device=cpu"
        )
    if strategy.spread:
        _refuse_spread(strategy)


def _refuse_spread(strategy: Strategy) -> None:
    """Where a replica is several workers, or goes through its batches as if it were."""
    policy, mesh = strategy.aggregation, strategy.mesh
    if not isinstance(policy, Synchronous) or policy.backups:
        raise InputError(
            f"shard_optimizer=True is for replicas that make one update together, but under aggregation="
            f"{text_of(policy)} the optimizer's state lies once, in memory that all share; write "
            "aggregation=synchronous, or leave shard_optimizer out"
        )
    if not strategy.order.flushes:
        raise InputError(
            f"shard_optimizer=True steps on the sum of all replicas' Δs, but under schedule={strategy.schedule} each "
            "stage moves its weights by itself; write replicas=2 schedule=1f1b, or leave shard_optimizer out"
        )
    if mesh.replicas == 1 and max(mesh.columns.copies) == 1:
        raise InputError(
            "shard_optimizer=True divides the optimizer's state among the workers that have the same part of A, but "
            f"of replicas=1 stages={strategy.stages} shards={strategy.shards} no two have; write replicas=2, or leave "
            "shard_optimizer out"
        )


def refuse_shards(job: Job) -> None:
    """Raise InputError where operators can't be divided under this job's strategy."""
    strategy = job.strategy
    _refuse_in_place(strategy)
    for name in ("compression", "shard_parameters"):
        value = getattr(strategy, name)
        if value not in (False, "none"):
            raise InputError(
                f"{name}={value} is about what whole replicas send each other, but shards={strategy.shards} of one "
                f"replica send parts of tensors; leave {name} out"
            )
    if strategy.device != "cpu":
        raise InputError(f"device={strategy.device}: shards on GPUs are not built yet; write device=cpu")


def _refuse_in_place(strategy: Strategy) -> None:
    policy = strategy.aggregation
    if isinstance(policy.delta, InPlace):
        raise InputError(
            f"aggregation={text_of(policy)}: replicas write one A in place, but of shards={strategy.shards} each has a "
            "part of A of its own; write aggregation=asynchronous"
        )


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
    order = strategy.order
    if strategy.replicated:
        _refuse_turns(strategy)
    if strategy.replicas > 1 and not order.flushes:
        raise InputError(
            f"replicas={strategy.replicas}: under schedule={strategy.schedule} each stage moves its weights by itself, "
            "before other replicas have sent their gradients; write replicas=1, or schedule=1f1b"
        )
    if strategy.tensor_parallel and not order.flushes:
        raise InputError(
            f"shards={strategy.shards}: under schedule={strategy.schedule} each stage moves its weights in the middle "
            "of a stream; shards of such stages are not built yet; write schedule=1f1b"
        )
    if strategy.tensor_parallel and order.splits_backward:
        raise InputError(
            f"schedule={strategy.schedule} takes the backward pass of each operator apart, which is not built for "
            f"operators that shards={strategy.shards} divide; write schedule=1f1b"
        )
    if strategy.tensor_parallel and strategy.recompute == "all":
        raise InputError(
            f"recompute=all cuts a stage into pieces, which is not built for stages that shards={strategy.shards} "
            "divide; write recompute=boundaries"
        )


def _refuse_turns(strategy: Strategy) -> None:
    """What can't be where several take turns at a stage."""
    stages, order = list(strategy.copies), strategy.order
    if not order.takes_turns:
        raise InputError(
            f"stages={stages}: several take turns at the micro-batches of a stage where all of a gradient is there "
            f"before it is applied and a worker has one part of the model, not under schedule={strategy.schedule}; "
            f"write schedule=1f1b, or stages={strategy.stage_count}"
        )
    if strategy.micro_batch_count < max(strategy.copies):
        raise InputError(
            f"stages={stages} with micro_batches={strategy.micro_batch_count}: {max(strategy.copies)} take turns at "
            f"them, so some would never have one; write micro_batches={2 * len(stages) * max(stages)}"
        )


def _refuse_policy(strategy: Strategy) -> None:
    policy, stages = strategy.aggregation, strategy.stage_count
    if isinstance(policy.delta, InPlace):
        raise InputError(
            f"aggregation={text_of(policy)}: replicas write one A in place, step by step, but of stages={stages} each "
            "has a part of A of its own; write aggregation=asynchronous"
        )
    if not strategy.order.flushes and (not isinstance(policy, Synchronous) or policy.backups):
        raise InputError(
            f"aggregation={text_of(policy)} says when A moves, but under schedule={strategy.schedule} each stage moves "
            "its weights by itself; write aggregation=synchronous, or schedule=1f1b"
        )


def _refuse_options(strategy: Strategy) -> None:
    for name in ("compression", "shard_parameters"):
        value = getattr(strategy, name)
        if value not in (False, "none"):
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


def refuse_norms(job: Job) -> None:
    """Raise InputError where ``noise_scale=True`` can't be had under this job's strategy."""
    strategy = job.strategy
    if not job.noise_scale:
        return
    for name in ("shard_optimizer", "shard_parameters"):
        if getattr(strategy, name):
            raise InputError(
                f"noise_scale=True looks at the sum of all Δs, of which under {name}=True each rank has a part alone; "
                f"leave one of them out for the run that measures"
            )
    if strategy.compression != "none":
        raise InputError(
            f"noise_scale=True compares the norms of Δs with that of their sum, but compression={strategy.compression} "
            "changes what is summed; leave one of them out for the run that measures"
        )
    if strategy.pipelined and not strategy.order.flushes:
        raise InputError(
            f"noise_scale=True looks at Δs of a whole model, but under schedule={strategy.schedule} each stage moves "
            "its weights by itself; write schedule=1f1b for the run that measures"
        )
