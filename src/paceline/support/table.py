"""Rows of the table of support: each is a combination that does not run, with the sentence to show."""

from collections.abc import Callable
from typing import NamedTuple

from paceline.core.delta import Gradient, InPlace
from paceline.support.case import Case


class Row(NamedTuple):
    """One combination that is not supported."""

    feature: str
    applies: Callable[[Case], bool]
    sentence: str
    """The values, the rule, and the line to write instead, as a template: ``{s.shards}`` is a field of the strategy."""


def _in_place(c: Case) -> bool:
    return isinstance(c.policy.delta, InPlace)


def _real(c: Case) -> bool:
    """Return True if workers really run: in virtual time one process computes their results."""
    return "virtual-time" not in c.features


_BETWEEN_REPLICAS = "is about what whole replicas send each other, but"

_MOVES = "but under schedule={s.schedule} each stage moves its weights before the others have their gradients"

TABLE: tuple[Row, ...] = (
    # ------------------------------------------------------------------------ what an engine does not support at all
    Row(
        "shards",
        lambda c: c.shards > 1 and "shards" not in c.features,
        "shards={s.shards}: engine={engine} does not divide operators; write engine={engines}",
    ),
    Row(
        "shards",
        lambda c: c.shard_rules and c.shards == 1,
        "shard_rules={s.shard_rules} say how operators are divided, but shards={s.shards} leaves them whole; write "
        "shards=2, or leave shard_rules out",
    ),
    Row(
        "stages",
        lambda c: c.pipelined and "stages" not in c.features,
        "stages={s.stages} micro_batches={s.micro_batch_count}: engine={engine} does not run pipelines; write "
        "engine={engines}",
    ),
    Row(
        "compression",
        lambda c: c.compression != "none" and "compression" not in c.features,
        "{feature}={value} is supported by engine={engines} alone, not by engine={engine}; leave it out, or write "
        "engine={engines}",
    ),
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and "shard_parameters" not in c.features,
        "{feature}={value} is supported by engine={engines} alone, not by engine={engine}; leave it out, or write "
        "engine={engines}",
    ),
    Row(
        "shard_optimizer",
        # Workers of several replicas that have the same part of A may divide the state on one host as well.
        lambda c: (
            bool(c.shard_optimizer)
            and "shard_optimizer" not in c.features
            and not (c.engine == "local" and c.several_workers)
        ),
        "{feature}={value} is supported by engine={engines} alone, not by engine={engine}; leave it out, or write "
        "engine={engines}",
    ),
    Row(
        "accumulate",
        lambda c: c.accumulate > 1 and not isinstance(c.policy.delta, Gradient),
        "accumulate={s.accumulate} is for policies that send gradients, but under aggregation={policy} replicas take "
        "steps of their own; write accumulate=1 and a longer period",
    ),
    Row(
        "virtual-time",
        lambda c: c.times and _real(c),
        "times= sets virtual time, but engine={engine} runs in real time; write engine='virtual'",
    ),
    Row(
        "asynchronous",
        lambda c: not c.lockstep and "asynchronous" not in c.features,
        "aggregation={policy}: under engine={engine} all ranks make one update of all gradients; write "
        "aggregation=synchronous, or engine='ray' (many hosts) or engine='local' (one)",
    ),
    # ------------------------------------------------ the gradient noise scale: whole Δs and their sum must be visible
    Row(
        "noise_scale",
        lambda c: c.noise_scale and not isinstance(c.policy.delta, Gradient),
        "noise_scale=True measures gradients, but under aggregation={policy} replicas take steps of their own; write "
        "aggregation=synchronous, or leave noise_scale out",
    ),
    Row(
        "noise_scale",
        lambda c: c.noise_scale and "noise_scale" not in c.features,
        "noise_scale=True: engine={engine} does not measure gradients; write engine={engines}",
    ),
    Row(
        "noise_scale",
        lambda c: c.noise_scale and bool(c.shard_optimizer),
        "noise_scale=True measures the sum of all Δs, of which under shard_optimizer=True each rank has a part alone; "
        "leave one of them out for the run that measures",
    ),
    Row(
        "noise_scale",
        lambda c: c.noise_scale and c.shard_parameters,
        "noise_scale=True measures the sum of all Δs, of which under shard_parameters=True each rank has a part alone; "
        "leave one of them out for the run that measures",
    ),
    Row(
        "noise_scale",
        lambda c: c.noise_scale and c.compression != "none",
        "noise_scale=True compares the norms of Δs with the norm of their sum, but compression={s.compression} changes "
        "what is summed; leave one of them out for the run that measures",
    ),
    Row(
        "noise_scale",
        lambda c: c.noise_scale and not c.flushes,
        "noise_scale=True measures Δs of a whole model, but under schedule={s.schedule} each stage moves its weights "
        "by itself; write schedule=1f1b for the run that measures",
    ),
    # --------------------------------------------------------------- Hogwild: replicas write one A, in one memory
    Row(
        "in-place",
        lambda c: _in_place(c) and not _real(c),
        "aggregation={policy} writes memory that replicas share, but engine={engine} runs one replica at a time; write "
        "engine=local",
    ),
    Row(
        "in-place",
        lambda c: _in_place(c) and "in-place" not in c.features,
        "aggregation={policy} writes memory that replicas share, but the replicas of engine={engine} share none; write "
        "engine=local",
    ),
    Row(
        "in-place",
        lambda c: _in_place(c) and c.shards > 1,
        "aggregation={policy}: replicas write one A in place, but each of shards={s.shards} has a part of A of its "
        "own; write aggregation=asynchronous",
    ),
    Row(
        "in-place",
        lambda c: _in_place(c) and c.pipelined,
        "aggregation={policy}: replicas write one A in place, step by step, but each of stages={s.stage_count} has a "
        "part of A of its own; write aggregation=asynchronous",
    ),
    Row(
        "in-place",
        lambda c: _in_place(c) and c.on_nonfinite == "skip",
        "on_nonfinite=skip discards a Δ before it is applied, but aggregation={policy} has none: replicas write A in "
        "place; write on_nonfinite='stop'",
    ),
    Row(
        "in-place",
        lambda c: _in_place(c) and c.device != "cpu",
        "aggregation={policy} shares A in the host's memory, not on device={s.device}; write device=cpu",
    ),
    # --------------------------------------------------------------------- operators that are divided among workers
    Row(
        "shards",
        lambda c: c.shards > 1 and c.compression != "none",
        f"compression={{s.compression}} {_BETWEEN_REPLICAS} shards={{s.shards}} of one replica send parts of tensors; "
        "leave compression out",
    ),
    Row(
        "shards",
        lambda c: c.shards > 1 and c.shard_parameters,
        f"shard_parameters=True {_BETWEEN_REPLICAS} shards={{s.shards}} of one replica send parts of tensors; leave "
        "shard_parameters out",
    ),
    Row(
        "shards",
        lambda c: c.shards > 1 and c.device != "cpu",
        "device={s.device}: shards on GPUs are not built yet; write device=cpu",
    ),
    Row(
        "shards",
        lambda c: c.shards > 1 and not c.flushes,
        "shards={s.shards}: under schedule={s.schedule} each stage moves its weights in the middle of a stream; shards "
        "of such stages are not built yet; write schedule=1f1b",
    ),
    Row(
        "shards",
        lambda c: c.shards > 1 and _real(c) and c.schedule is not None and c.schedule.splits_backward,
        "schedule={s.schedule} splits the backward pass of each operator, which is not built for operators that "
        "shards={s.shards} divide; write schedule=1f1b",
    ),
    Row(
        "shards",
        lambda c: c.shards > 1 and _real(c) and c.pipelined and c.recompute == "all",
        "recompute=all cuts a stage into pieces, which is not built for stages that shards={s.shards} divide; write "
        "recompute=boundaries",
    ),
    # -------------------------------------------------------------------------------------------------- pipelines
    Row(
        "stages",
        lambda c: _real(c) and c.stage_replicas > 1 and c.schedule is not None and not c.schedule.allows_stage_replicas,
        "stages={copies}: several workers take turns at the micro-batches of a stage where a gradient is complete "
        "before it is applied and a worker has one part of the model, not under schedule={s.schedule}; write "
        "schedule=1f1b, or stages={s.stage_count}",
    ),
    Row(
        "stages",
        lambda c: _real(c) and c.stage_replicas > c.micro_batches,
        "stages={copies} with micro_batches={s.micro_batch_count}: {most} workers take turns at them, so some would "
        "never have one; write micro_batches={enough}",
    ),
    Row(
        "stages",
        lambda c: c.pipelined and c.compression != "none",
        f"compression={{s.compression}} {_BETWEEN_REPLICAS} stages={{s.stage_count}} of one replica send activations "
        "alone; leave compression out",
    ),
    Row(
        "stages",
        lambda c: c.pipelined and c.shard_parameters,
        f"shard_parameters=True {_BETWEEN_REPLICAS} stages={{s.stage_count}} of one replica send activations alone; "
        "leave shard_parameters out",
    ),
    # -------------------------------------- pipelines that never flush: weights move before all gradients are known
    Row(
        "async-stages",
        lambda c: not c.flushes and "async-stages" not in c.features,
        "schedule={s.schedule} moves weights within a stream of micro-batches, but engine={engine} computes each Δ as "
        "one process does, by one version; write engine=local, or schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.replicas > 1,
        "replicas={s.replicas}: under schedule={s.schedule} each stage moves its weights by itself, before other "
        "replicas have sent their gradients; write replicas=1, or schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and not c.lockstep,
        "aggregation={policy} says when A moves, but under schedule={s.schedule} each stage moves its weights by "
        "itself; write aggregation=synchronous, or schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: c.schedule is not None and c.schedule.updates_each and c.micro_batches > 1,
        "schedule={s.schedule} makes an update of each micro-batch, so micro_batches={s.micro_batches} of them are as "
        "many batches; write micro_batches=1 and a smaller batch_size=, or schedule=pipedream-2bw",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.device != "cpu",
        "device={s.device}: NCCL transports what two stages send each other in one order, but under "
        "schedule={s.schedule} each goes on before the other is given the next batch; write device=cpu, or "
        "schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.clip_norm is not None,
        f"clip_norm={{clip_norm}} scales a gradient by the norm of all of it, {_MOVES}; write clip_norm=None, or "
        "schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.on_nonfinite == "skip",
        f"on_nonfinite='skip' discards a gradient of which any part is not finite, {_MOVES}; write "
        "on_nonfinite='stop', or schedule=1f1b",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.accumulate > 1,
        "accumulate={s.accumulate} makes one update of several batches, but under schedule={s.schedule} each batch is "
        "one; write accumulate=1 and a larger batch_size=",
    ),
    Row(
        "async-stages",
        lambda c: not c.flushes and c.batchnorm == "mini-batch",
        "batchnorm=mini-batch waits for the end of a mini-batch, but under schedule={s.schedule} the next one begins "
        "before that; write batchnorm=micro-batch",
    ),
    # ---------------------------------------------------------- FSDP2: each rank keeps a part of the parameters
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and c.compression != "none",
        "shard_parameters=True sums each layer's gradients as they come, and compression={s.compression} all of Δ at "
        "once; leave one of them out",
    ),
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and c.shard_optimizer is False,
        "shard_parameters=True divides the optimizer's state as well, but shard_optimizer=False; leave shard_optimizer "
        "out",
    ),
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and c.device != "cpu",
        "shard_parameters=True is built for CPUs alone, not for device={s.device}; leave it out, or write device=cpu",
    ),
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and c.on_nonfinite == "skip",
        "on_nonfinite='skip' discards a bad Δ, but shard_parameters=True has added it to the others' by then; write "
        "on_nonfinite='stop' or leave shard_parameters out",
    ),
    Row(
        "shard_parameters",
        lambda c: c.shard_parameters and c.accumulate > 1 and getattr(c.policy, "combine", "mean") == "sum",
        "shard_parameters=True adds a batch before it is known how many samples its accumulate={s.accumulate} batches "
        "have together, which combine=sum divides by; write combine=mean or accumulate=1",
    ),
    # --------------------------------------- ZeRO-1: workers with the same part of A divide the optimizer's state
    Row(
        "shard_optimizer",
        lambda c: bool(c.shard_optimizer) and c.compression != "none",
        "shard_optimizer=True sends each rank its part of Δ, and compression={s.compression} all of it; leave one of "
        "them out",
    ),
    Row(
        "shard_optimizer",
        lambda c: bool(c.shard_optimizer) and c.device != "cpu",
        "shard_optimizer=True is built for CPUs alone, not for device={s.device}; leave it out, or write device=cpu",
    ),
    Row(
        "shard_optimizer",
        lambda c: bool(c.shard_optimizer) and c.several_workers and not c.lockstep,
        "shard_optimizer=True is for replicas that make one update together, but under aggregation={policy} the "
        "optimizer's state is kept once, in memory that all share; write aggregation=synchronous, or leave "
        "shard_optimizer out",
    ),
    Row(
        "shard_optimizer",
        lambda c: bool(c.shard_optimizer) and not c.flushes,
        "shard_optimizer=True steps on the sum of all replicas' Δs, but under schedule={s.schedule} each stage moves "
        "its weights by itself; write replicas=2 schedule=1f1b, or leave shard_optimizer out",
    ),
    Row(
        "shard_optimizer",
        lambda c: bool(c.shard_optimizer) and c.several_workers and c.replicas == 1 and c.stage_replicas == 1,
        "shard_optimizer=True divides the optimizer's state among the workers that have the same part of A, but of "
        "replicas=1 stages={s.stages} shards={s.shards} no two have; write replicas=2, or leave shard_optimizer out",
    ),
    # ------------------------------------------------------------------------------------ what is built for CPUs alone
    Row(
        "cuda",
        lambda c: c.device != "cpu" and "cuda" not in c.features,
        "engine={engine} computes on the CPU, not on device={s.device}; write device=cpu",
    ),
    Row(
        "cuda",
        lambda c: c.device != "cpu" and c.engine == "local" and c.several_workers and not c.lockstep,
        "device={s.device}: A is in the host's memory, and under aggregation={policy} each worker of a replica of "
        "several reads its part there; write device=cpu",
    ),
    Row(
        "cuda",
        lambda c: c.device != "cpu" and c.compression != "none",
        "compression={s.compression} is built for CPUs alone, not for device={s.device}; leave it out, or write "
        "device=cpu",
    ),
)
"""All rows in the order in which they are checked: the first that applies is shown."""
