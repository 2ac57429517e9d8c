"""Arrangements that Paceline supports, and the Strategy that train takes for each; no torch.

Combinations of features are looked up in :mod:`paceline.support`. Only what no Strategy can express (ZeRO-2, sequence,
context and expert parallelism, recomputation of attention alone), and sizes that don't fit each other, is decided here.
A test trains each kind of arrangement that the search proposes up to the first step.
"""

from dataclasses import replace
from functools import cache
from math import ceil
from typing import Literal, TypeAlias

from paceline import support
from paceline.aggregation import Synchronous
from paceline.planner.base import Arrangement, Recomputed
from paceline.schedule import Schedule, parse
from paceline.strategy import Recompute, Strategy
from paceline.support import Case

# Engines of real time that support replicas of several workers; on Ray servers have A.
EngineName: TypeAlias = Literal["local", "distributed", "ray"]

RECOMPUTES: dict[Recomputed, Recompute] = {"none": "none", "full": "all", "stage": "boundaries"}


def pipelined(arrangement: Arrangement) -> bool:
    """Return True if a replica processes its batches by micro-batches rather than by accumulating."""
    return arrangement.stages > 1 or arrangement.recompute != "none"


def strategy(arrangement: Arrangement, device: Literal["cpu", "cuda"] = "cpu") -> Strategy:
    """Return the strategy that train takes.

    >>> print(strategy(Arrangement(2, stages=4, shards=2, micro_batches=8, schedule="interleaved", chunks=3)))
    replicas=2 stages=4 shards=2 schedule=interleaved:chunks=3 micro_batches=8
    >>> print(strategy(Arrangement(2, micro_batches=4, divided=3)))
    replicas=2 accumulate=4 shard_parameters=true
    >>> print(strategy(Arrangement(stages=2, shards=2, stage_shards=(2, 1), micro_batches=8, accumulated=2)))
    replicas=1 stages=2 shards=[2,1] micro_batches=4 accumulate=2
    """
    a, by_micro_batches = arrangement, pipelined(arrangement)
    return Strategy(
        replicas=a.replicas,
        stages=a.copies if a.copies and max(a.copies) > 1 else a.stages,
        shards=a.stage_shards or a.shards,
        schedule=f"interleaved:chunks={a.chunks}" if a.chunks > 1 else a.schedule,
        micro_batches=a.mini_batch if by_micro_batches else None,
        recompute=RECOMPUTES[a.recompute],
        accumulate=a.accumulated if by_micro_batches else a.micro_batches,
        # None: the engine divides the optimizer's state if it finds that this pays.
        shard_optimizer=True if a.divided == 1 else None,
        shard_parameters=a.divided == 3,
        device=device,
    )


def supports(arrangement: Arrangement, device: str = "cpu", engine: EngineName | None = None) -> bool:
    """Return True if an arrangement can be trained.

    Args:
        arrangement: the arrangement.
        device: kind of its devices.
        engine: the engine; None: any.
    """
    a, order = arrangement, _order(arrangement.schedule, arrangement.chunks)
    if a.divided == 2 or a.recompute not in RECOMPUTES or a.sequence_divided or a.context > 1 or a.experts > 1:
        return False
    by_micro_batches, copies, m = pipelined(a), max(a.copies, default=1), a.mini_batch
    if a.divided and a.replicas == 1 and copies == 1:  # no two workers have the same part of the optimizer's state
        return False
    if a.chunks > 1 and (a.stages == 1 or m % a.stages):  # chunks take turns by as many micro-batches as stages
        return False
    if a.accumulated > 1 and (not by_micro_batches or a.micro_batches % a.accumulated):  # whole mini-batches
        return False
    if not order.flushes and (a.stages == 1 or (not order.updates_each and a.micro_batches < a.stages)):
        return False
    # The rows look at most sizes only as one or several, so that few combinations are looked up, however many workers.
    sizes = min(a.replicas, 2), min(a.stages, 2), min(a.shards, 2), copies
    batches = m if copies > 1 else min(m, 2), min(a.accumulated if by_micro_batches else a.micro_batches, 2)
    # The distributed engine supports all that the local one does, while replicas make one update together.
    run = engine or "distributed", device, order if by_micro_batches else None
    return _combines(*run, sizes, batches, RECOMPUTES[a.recompute], a.divided)


@cache
def _combines(
    engine: EngineName,
    device: str,
    order: Schedule | None,
    sizes: tuple[int, int, int, int],
    batches: tuple[int, int],
    recompute: Recompute,
    divided: int,
) -> bool:
    """Look up replicas, stages, shards and stage replicas; micro-batches and mini-batches."""
    (micro_batches, accumulate), optimizer = batches, True if divided == 1 else None
    run = engine, support.ENGINE_FEATURES[engine], Strategy, Synchronous()  # of the strategy no sentence is shown
    case = Case(*run, *sizes, order is not None, order, micro_batches, recompute, accumulate, device)
    return support.first_row(replace(case, shard_optimizer=optimizer, shard_parameters=divided == 3)) is None


@cache
def _order(schedule: str, chunks: int) -> Schedule:
    return parse(schedule if chunks == 1 else f"interleaved:chunks={chunks}")


def plainness(arrangement: Arrangement) -> float:
    """Return the number of features of an arrangement: 0 for a single process, 2 for replicas that divide an optimizer.

    Each feature counts one, except for micro-batches, which count the more the more there are: 1 - 1/m.
    """
    a = arrangement
    accumulates = a.accumulated > 1 or (a.micro_batches > 1 and not pipelined(a))
    features = (a.replicas > 1, a.stages > 1, a.shards > 1, accumulates, a.schedule != "1f1b", a.chunks > 2)
    others = (bool(a.copies), bool(a.stage_shards), a.divided > 0, a.recompute != "none")
    return sum(features) + sum(others) + 1 - 1 / a.micro_batches


def engine_of(arrangement: Arrangement, devices_per_host: int) -> EngineName:
    """Return the engine that runs it: processes of one host if they suffice."""
    several_hosts = arrangement.workers > devices_per_host
    return "distributed" if several_hosts or not supports(arrangement, "cpu", "local") else "local"


def command(program: str, strategy: Strategy, engine: EngineName, devices_per_host: int) -> str:
    """Return the line to run; if it names hosts, on each of them.

    >>> print(command("digits", Strategy(replicas=2), "local", 8))
    paceline train digits --strategy "replicas=2"
    >>> print(command("digits", Strategy(replicas=16), "distributed", 8).split(" --no-python ")[0])
    torchrun --nnodes 2 --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint HOST_A:29500 --nproc-per-node 8
    """
    train = f'paceline train {program} --strategy "{strategy}"'
    if engine == "ray":
        return f"{train} --engine ray:auto  # on the first host of a Ray cluster"
    if engine == "local" or strategy.workers == 1:
        return train
    hosts, left = ceil(strategy.workers / devices_per_host), strategy.workers % devices_per_host
    if hosts == 1:
        return f"torchrun --nproc-per-node {strategy.workers} --no-python {train} --engine distributed"
    rendezvous = f"--nnodes {hosts} --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint HOST_A:29500"
    last = f"  # on the last host --nproc-per-node {left}" if left else ""
    return f"torchrun {rendezvous} --nproc-per-node {devices_per_host} --no-python {train} --engine distributed{last}"
