"""The objective of a search, and the constraints that a plan has to meet."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from paceline.clock.times import Delay
from paceline.core.errors import InputError, unknown
from paceline.planner.base import Workload
from paceline.planner.cluster import Cluster
from paceline.planner.search.supported import EngineName

# Samples a second; effective samples a second, by their statistical efficiency; peak bytes of a worker; time until a
# loss is reached.
Objective: TypeAlias = Literal["throughput", "goodput", "memory", "time-to-loss"]

# Times that the batch is halved and doubled where it may vary.
FEWER, MORE = 4, 6


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objective and limits of a search.

    Args:
        objective: the quantity to optimise.
        noise_scale: X, samples: tr(Σ)/|G|² of the program's gradients; a run's summary has it.
        fixed: the batch that does not vary: the workload's batch is of all replicas together, or of one.
        workers: their maximum; None: all of the cluster.
        memory_bytes: of a worker; None: the device's.
        engine: that has to support the plan; None: any; ``ray`` has servers, and policies compete.
        unbuilt: whether to propose plans that Paceline does not support on such devices yet.
        delay: of replicas; then policies compete.
        simulated: number of the best plans to simulate.
        replicas: their exact number; None: any.
        most_chunks: maximal v of interleaved schedules.

    Raises:
        InputError: an unknown objective, one that needs a noise scale without it, a number out of its range.

    >>> Objectives(objective="goodput", noise_scale=1000).efficiency(1100, 100)
    0.5238095238095238
    """

    objective: Objective = "throughput"
    noise_scale: float | None = None
    fixed: Literal["global", "replica"] = "global"
    workers: int | None = None
    memory_bytes: float | None = None
    engine: EngineName | None = None
    unbuilt: bool = False
    delay: Delay | None = None
    simulated: int = 50
    replicas: int | None = None
    most_chunks: int = 8

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise unknown("objective", str(self.objective), get_args(Objective))
        if self.statistical and self.noise_scale is None:
            raise InputError(
                f"objective={self.objective} counts how much a sample of a larger batch is worth, which a noise scale "
                "says; write noise_scale=1000 (samples; a run's summary has it), or objective=throughput."
            )
        if self.noise_scale is not None and not (0 <= self.noise_scale < math.inf):
            raise InputError(f"noise_scale={self.noise_scale}: it is 0 samples or more; write noise_scale=1000, say.")
        for name in ("workers", "simulated", "replicas", "most_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} is less than one; write {name}=1 or more.")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise InputError(f"memory_bytes={self.memory_bytes} holds nothing; write memory_bytes=8e9, say.")

    @property
    def statistical(self) -> bool:
        """True if samples of larger batches count less, by their statistical efficiency, so that the batch may vary."""
        return self.objective in ("goodput", "time-to-loss")

    def batches(self, workload: Workload, max_workers: int = 1) -> list[int]:
        """Return the batches to consider: the workload's own, others where they may vary, or of 1, 2, ... replicas."""
        own = workload.global_batch
        if self.fixed == "replica":
            return [own * replicas for replicas in range(1, max_workers + 1)]
        larger = (own * 2**k for k in range(1, MORE + 1))
        smaller = (own // 2**k for k in range(1, FEWER + 1) if own % 2**k == 0)
        return list(dict.fromkeys([own, *larger, *smaller])) if self.statistical else [own]

    def efficiency(self, batch: float, reference: float, staleness: float = 0.0) -> float:
        """Return a sample's worth relative to one of the reference batch: (X + B0) / (X + (1 + τ) B); 1 without X.

        Pollux (2008.12260) for fresh gradients. Δs that are τ updates old slow the part of progress that noise does not
        limit as a batch 1 + τ times as large would: iterations O(τ + X/B), Stich & Karimireddy (1909.05350).
        """
        if self.noise_scale is None or batch + self.noise_scale == 0:
            return 1.0
        return (self.noise_scale + reference) / (self.noise_scale + (1 + staleness) * batch)

    def max_workers(self, cluster: Cluster) -> int:
        """Return the number of workers that a plan may have."""
        return min(cluster.workers, self.workers or cluster.workers)

    def max_bytes(self, cluster: Cluster) -> float:
        """Return the memory that a worker may use."""
        return min(self.memory_bytes or math.inf, cluster.device.memory_bytes)
