"""Support of arrangements by Paceline, and the Strategy and command of each: the planner's view of paceline.support.

Sizes of an arrangement are all known, and nothing of torch is needed. A test checks every proposed strategy against the
table of support itself.
"""

from functools import cache
from math import ceil
from typing import Literal, TypeAlias

from paceline.planner.base import Arrangement, Recomputed
from paceline.schedule import Schedule, parse
from paceline.strategy import Recompute, Strategy

EngineName: TypeAlias = Literal["local", "distributed"]
"""Engines that support replicas of several workers in real time."""

RECOMPUTES: dict[Recomputed, Recompute] = {"none": "none", "full": "all", "stage": "boundaries"}


def pipelined(arrangement: Arrangement) -> bool:
    """Return True if a replica processes its batch by micro-batches rather than by accumulation."""
    return arrangement.stages > 1 or arrangement.recompute != "none"


def strategy(arrangement: Arrangement, device: Literal["cpu", "cuda"] = "cpu") -> Strategy:
    """Return the Strategy of an arrangement.

    >>> print(strategy(Arrangement(2, stages=4, shards=2, micro_batches=8, schedule="interleaved", chunks=3)))
    replicas=2 stages=4 shards=2 schedule=interleaved:chunks=3 micro_batches=8
    >>> print(strategy(Arrangement(2, micro_batches=4, divided=3)))
    replicas=2 accumulate=4 shard_parameters=true
    >>> print(strategy(Arrangement(stages=2, shards=2, stage_shards=(2, 1), micro_batches=8, accumulated=2)))
    replicas=1 stages=2 shards=[2,1] micro_batches=4 accumulate=2
    """
    replicated_stages = bool(arrangement.copies) and max(arrangement.copies) > 1
    by_micro_batches = pipelined(arrangement)
    interleaved = arrangement.chunks > 1
    return Strategy(
        replicas=arrangement.replicas,
        stages=arrangement.copies if replicated_stages else arrangement.stages,
        shards=arrangement.stage_shards or arrangement.shards,
        schedule=f"interleaved:chunks={arrangement.chunks}" if interleaved else arrangement.schedule,
        micro_batches=arrangement.mini_batch if by_micro_batches else None,
        recompute=RECOMPUTES[arrangement.recompute],
        accumulate=arrangement.accumulated if by_micro_batches else arrangement.micro_batches,
        # Only where it makes a difference: by default it is divided where Paceline finds that it pays.
        shard_optimizer=True if arrangement.divided == 1 else None,
        shard_parameters=arrangement.divided == 3,
        device=device,
    )


def refusal(arrangement: Arrangement) -> str | None:
    """Return why no engine supports it, as a clause; None: one does."""
    t, p, order = arrangement.shards, arrangement.stages, _order(arrangement.schedule, arrangement.chunks)
    if arrangement.divided == 2 or arrangement.recompute not in RECOMPUTES:
        return "gradients alone are not divided, and activations of attention alone are not recomputed"
    if arrangement.sequence_divided or arrangement.context > 1 or arrangement.experts > 1:
        return "sequences and experts are not divided"
    if arrangement.divided == 3 and (p > 1 or t > 1 or arrangement.recompute != "none"):
        return "parameters are divided among whole replicas alone"
    if t > 1 and (order.splits_backward or arrangement.recompute == "full"):
        return "shards have no split backward passes and no recomputation within a stage"
    if arrangement.copies and max(arrangement.copies) > 1 and not order.allows_stage_replicas:
        return f"schedule={arrangement.schedule} does not support replicated stages"
    if arrangement.copies and max(arrangement.copies) > arrangement.mini_batch:
        return "some replicas of a stage would never have a micro-batch"
    if not order.flushes and (why := _no_stream(arrangement, order)):
        return why
    return _too_few(arrangement)


def _no_stream(arrangement: Arrangement, order: Schedule) -> str | None:
    """Return why a pipeline can't be asynchronous."""
    a = arrangement
    if a.replicas > 1 or a.shards > 1 or a.divided or a.accumulated > 1:
        return f"under {a.schedule} each stage updates its weights by itself"
    if order.updates_each and a.micro_batches > 1:
        return f"under {a.schedule} each micro-batch is a step"
    if a.stages == 1 or (not order.updates_each and a.micro_batches < a.stages):
        return f"{a.schedule} takes as many micro-batches as there are stages, and two of them"
    return None


@cache
def _order(schedule: str, chunks: int) -> Schedule:
    return parse(schedule if chunks == 1 else f"interleaved:chunks={chunks}")


def _too_few(arrangement: Arrangement) -> str | None:
    """Return why sizes don't fit each other."""
    a = arrangement
    if a.divided and a.replicas == 1 and max(a.copies, default=1) == 1:
        return "no other worker has the same part of the optimizer's state"
    if a.chunks > 1 and (a.stages == 1 or a.mini_batch % a.stages):
        return "interleaved parts alternate by as many micro-batches as there are stages"
    if a.accumulated > 1 and (not pipelined(a) or a.micro_batches % a.accumulated):
        return "micro-batches are whole mini-batches of a pipeline"
    return None


def plainness(arrangement: Arrangement) -> float:
    """Return the complexity: 0 for a single process, 2 for replicas that divide their optimizer.

    Each option counts one, and micro-batches the more the more there are: 1 - 1/m.
    """
    a = arrangement
    accumulates = a.accumulated > 1 or (a.micro_batches > 1 and not pipelined(a))
    sizes = (a.replicas > 1, a.stages > 1, a.shards > 1, accumulates, a.schedule != "1f1b", a.chunks > 2)
    others = (bool(a.copies), bool(a.stage_shards), a.divided > 0, a.recompute != "none")
    return sum(sizes) + sum(others) + 1 - 1 / a.micro_batches


def device_refusal(
    arrangement: Arrangement, device: Literal["cpu", "cuda"], engine: EngineName | None = None
) -> str | None:
    """Return why such a device, or this engine, does not support it yet, as a clause; None: it does."""
    if device == "cuda" and arrangement.shards > 1:
        return "shards on GPUs are not supported yet"
    if device == "cuda" and arrangement.divided:
        return "optimizers and parameters are divided between CPUs alone yet"
    if device == "cuda" and not _order(arrangement.schedule, arrangement.chunks).flushes:
        return "stages on GPUs wait for a flush"
    whole = not pipelined(arrangement) and arrangement.shards == 1
    if engine == "local" and (arrangement.divided == 3 or (arrangement.divided == 1 and whole)):
        return "the local engine keeps A once for all replicas, so there is nothing to divide"
    return None


def engine_of(arrangement: Arrangement, devices_per_host: int) -> EngineName:
    """Return the engine that runs it: processes of one host where these suffice."""
    apart = arrangement.workers > devices_per_host
    return "distributed" if apart or device_refusal(arrangement, "cpu", "local") is not None else "local"


def command(program: str, strategy: Strategy, engine: EngineName, devices_per_host: int) -> str:
    """Return the command to run, on each host where it names hosts.

    >>> print(command("digits", Strategy(replicas=2), "local", 8))
    paceline train digits --strategy "replicas=2"
    >>> print(command("digits", Strategy(replicas=16), "distributed", 8).split(" --no-python ")[0])
    torchrun --nnodes 2 --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint HOST_A:29500 --nproc-per-node 8
    """
    train = f'paceline train {program} --strategy "{strategy}"'
    if engine == "local" or strategy.workers == 1:
        return train
    hosts, left = ceil(strategy.workers / devices_per_host), strategy.workers % devices_per_host
    if hosts == 1:
        return f"torchrun --nproc-per-node {strategy.workers} --no-python {train} --engine distributed"
    meet = f"--nnodes {hosts} --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint HOST_A:29500"
    last = f"  # on the last host --nproc-per-node {left}" if left else ""
    return f"torchrun {meet} --nproc-per-node {devices_per_host} --no-python {train} --engine distributed{last}"
