"""What can't be done with replicas whose operators are divided, said before anything starts."""

from paceline.aggregation import text_of
from paceline.core.delta import InPlace
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.strategy import Strategy


def refuse_shards(job: Job) -> None:
    """Raise InputError where operators can't be divided under this job's strategy."""
    strategy = job.strategy
    _refuse_policy(strategy)
    for name in ("compression", "shard_parameters"):
        value = getattr(strategy, name)
        if value not in (False, "none"):
            raise InputError(
                f"{name}={value} is about what whole replicas send each other, but shards={strategy.shards} of one "
                f"replica send parts of tensors; leave {name} out"
            )
    if strategy.device != "cpu":
        raise InputError(f"device={strategy.device}: shards on GPUs are not built yet; write device=cpu")


def _refuse_policy(strategy: Strategy) -> None:
    policy = strategy.aggregation
    if isinstance(policy.delta, InPlace):
        raise InputError(
            f"aggregation={text_of(policy)}: replicas write one A in place, but of shards={strategy.shards} each has a "
            "part of A of its own; write aggregation=asynchronous"
        )
