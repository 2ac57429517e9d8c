"""Where an optimizer's state can't be divided among the workers that have the same part of A, said before anything
starts."""

from paceline.aggregation import Synchronous, text_of
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
