"""Where no rank has a whole Δ, or the whole sum, of which the norm could be told."""

from paceline.core.errors import InputError
from paceline.engine.base import Job


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
