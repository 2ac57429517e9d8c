"""Combination of features that is looked up in the table of support, and the features of each engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from paceline.aggregation import Aggregation
from paceline.core.delta import Gradient
from paceline.schedule import Schedule
from paceline.strategy import Strategy

Feature: TypeAlias = Literal[
    "asynchronous",  # policies by which replicas do not all make one update together
    "in-place",  # replicas that write one A in shared memory (Hogwild)
    "stages",  # replicas that are pipelines
    "async-stages",  # pipelines that never flush (PipeDream)
    "shards",  # replicas whose operators are divided
    "accelerator",
    "accelerator-stages",  # pipelines on accelerators
    "compression",
    "shard_optimizer",
    "groups-shard_optimizer",  # the same where a replica is several workers
    "shard_parameters",
    "noise_scale",
    "virtual-time",
    "on_death",  # replicas whose death the run survives
    "servers",  # A in slices, each with a server of its own
    "standby",  # a second copy of A, for the death of the server
    "elastic",  # replicas that come and go while the run lasts
    "pull_ahead",
    "no-server",  # A is with the replicas alone
    "compile",
]

# Beginning of a feature that an engine supports only where a replica is several workers.
GROUPS = "groups-"

_DEVICES: frozenset[Feature] = frozenset({"accelerator", "accelerator-stages"})
_COMMON: frozenset[Feature] = _DEVICES | {"compile", "stages", "shards"}
_PARALLEL: frozenset[Feature] = _COMMON | {"async-stages", "noise_scale"}
_SENT: frozenset[Feature] = frozenset({"compression", "servers", "pull_ahead"})

# Features of the engines that come with Paceline; the planner chooses among engines without importing any.
ENGINE_FEATURES: Mapping[str, frozenset[Feature]] = {
    "local": _PARALLEL | {"asynchronous", "in-place", "groups-shard_optimizer", "on_death", "elastic"},
    "virtual": _COMMON | {"asynchronous", "noise_scale", "virtual-time", "servers", "pull_ahead"},
    "ray": _COMMON | _SENT | {"asynchronous", "on_death", "standby", "elastic"},
    "distributed": _PARALLEL | _SENT | {"asynchronous", "shard_optimizer", "shard_parameters", "on_death", "no-server"},
}


# Fields of a case that a strategy has under the same names.
_SAME = (
    *("replicas", "pipelined", "accumulate", "device", "compression", "shard_optimizer", "shard_parameters"),
    *("elastic", "partition", "servers", "standby", "pull_ahead", "compile"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One combination as plain values, so that the planner can check many arrangements without making strategies.

    Args:
        engine: name of the engine.
        features: features that it supports.
        strategy: function that makes the strategy, whose values the sentences show.
        policy: the aggregation.
        replicas, stages, shards: sizes of the mesh; of unequal ones the largest.
        stage_replicas: the largest number of workers that take turns at a stage (PipeDream's replicated stages).
        pipelined: True if a replica processes its batches by micro-batches.
        schedule: schedule of the pipeline; None without one.
        micro_batches: m, per mini-batch.
        recompute, accumulate, device, compression, shard_optimizer, shard_parameters, servers, standby, pull_ahead,
            compile, partition, batchnorm: fields of the strategy.
        elastic: True if replicas may come and go.
        shard_rules: True if the strategy has rules of the user's.
        global_batch: True if the program says the size of the global batch.
        clip_norm: the largest norm of a gradient, of the program; None: any.
        on_nonfinite, on_death, noise_scale: options of the run.
        times: True if the run is given times of virtual time.
    """

    engine: str
    features: frozenset[Feature]
    strategy: Callable[[], Strategy]
    policy: Aggregation[Any]
    replicas: int = 1
    stages: int = 1
    shards: int = 1
    stage_replicas: int = 1
    pipelined: bool = False
    schedule: Schedule | None = None
    micro_batches: int = 1
    recompute: str = "none"
    accumulate: int = 1
    device: str = "cpu"
    compression: str = "none"
    shard_optimizer: bool | None = None
    shard_parameters: bool = False
    servers: int | None = None
    standby: int = 0
    pull_ahead: bool = False
    compile: bool | Literal["graph"] = False
    elastic: bool = False
    partition: str = "global"
    shard_rules: bool = False
    batchnorm: str = "micro-batch"
    global_batch: bool = False
    clip_norm: float | None = None
    on_nonfinite: str = "stop"
    on_death: str | None = None
    noise_scale: bool = False
    times: bool = False

    @classmethod
    def of(cls, strategy: Strategy, engine: str, features: frozenset[Feature] | None = None, **options: Any) -> "Case":
        """Return the case of a strategy.

        Args:
            strategy: the strategy.
            engine: name of the engine.
            features: features of the engine; None: those in :data:`ENGINE_FEATURES`.
            options: fields of this class that are no part of a strategy.
        """
        return cls(
            engine,
            ENGINE_FEATURES[engine] if features is None else features,
            # Only a refusal needs the strategy itself, for its sentence.
            lambda: strategy,
            strategy.aggregation,
            stages=strategy.stage_count,
            shards=max(strategy.shards) if isinstance(strategy.shards, tuple) else strategy.shards,
            stage_replicas=max(strategy.copies),
            schedule=strategy.order if strategy.pipelined else None,
            micro_batches=strategy.micro_batch_count,
            recompute=strategy.recompute,
            shard_rules=bool(strategy.shard_rules),
            batchnorm=strategy.batchnorm,
            **{name: getattr(strategy, name) for name in _SAME},
            **options,
        )

    @property
    def lockstep(self) -> bool:
        """True if all replicas make one update together: of gradients, or where no server has A, of any Δ."""
        together = isinstance(self.policy.delta, Gradient) or "no-server" in self.features
        return together and self.policy.collective is not None

    @property
    def survives_deaths(self) -> bool:
        """True if A is kept where it outlives replicas, whose death the run is to survive."""
        return self.on_death in ("continue", "replace") or self.elastic

    @property
    def served(self) -> bool:
        """True if A is kept apart from replicas, each of which goes its own pace, or may die."""
        return not self.lockstep or (self.survives_deaths and "no-server" not in self.features)

    @property
    def several_workers(self) -> bool:
        """True if a replica is several workers, or processes its batches by micro-batches."""
        return self.pipelined or self.shards > 1

    def supports(self, feature: str, features: frozenset[Feature]) -> bool:
        """Return whether an engine with these features has that one for replicas like these."""
        return feature in features or (self.several_workers and GROUPS + feature in features)

    @property
    def flushes(self) -> bool:
        """True unless a pipeline updates weights while micro-batches are under way."""
        return self.schedule is None or self.schedule.flushes
