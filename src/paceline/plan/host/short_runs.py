"""A few steps of the program itself by each kind of worker: what a worker holds beside what can be counted.

::

    held        what was measured of the worker that held most
    - base      of a worker that has no model                       empty_runs.py
    - own       its parameters, gradients, optimizer and what it saves for backward
    = beside    copies of the model: A as the server has it, Δs on their way, what preparing it has left behind
"""

from collections.abc import Mapping, Sequence

from paceline.core.errors import PacelineError
from paceline.core.records import WorkerFigures
from paceline.engine.base import Engine
from paceline.engine.local.engine import LocalEngine
from paceline.plan.base import Numerics
from paceline.plan.host.empty_runs import unwatched
from paceline.plan.host.here import job_for
from paceline.plan.host.profile import Unit
from paceline.program import Program

RUNS = 2
"""Of each kind."""

STEPS = 6
"""Of each run: Δs of several steps may be on their way at once."""


def held_beside(
    program: Program, workers: int, base_bytes: Mapping[str, int], numerics: Numerics, units: Sequence[Unit], batch: int
) -> dict[str, float]:
    """By kind of worker, in bytes for each element of the model; none of kinds that the program can't have.

    Args:
        program: is run.
        workers: in all.
        base_bytes: of workers without a model.
        numerics: bytes for each parameter.
        units: what they save of a batch.
        batch: samples of one replica in a step.
    """
    saved = sum(unit.saved.of(batch) for unit in units)
    elements = sum(parameter.numel() for parameter in program.build().parameters())
    found: dict[str, float] = {}
    for kinds in (("alone", "replicas"), ("stages", "shards")):  # those whose fork server imports the same
        with LocalEngine() as engine:
            for kind in kinds:
                most = _most(program, kind, workers, engine) if kind == "alone" or workers > 1 else None
                if most is not None:
                    counted = base_bytes[kind] + own_bytes(most, kind, numerics, saved)
                    found[kind] = ((most.peak_memory_bytes or 0) - counted) / elements
    return found


def own_bytes(most: WorkerFigures, kind: str, numerics: Numerics, saved: float) -> float:
    """What can be counted of a worker: replicas of one worker have no optimizer, for who holds A has it."""
    own = most.parameter_bytes or 0
    whole = kind in ("alone", "replicas")
    each = numerics.parameter + numerics.gradient + (0.0 if whole else numerics.optimizer)
    return own * each / numerics.parameter + (saved if most.peak_saved_bytes is None else most.peak_saved_bytes)


def _most(program: Program, kind: str, workers: int, engine: Engine) -> WorkerFigures | None:
    """The worker that holds most, in the run in which that is less; None: the program can't be divided so.

    Pages that processes share are counted in equal parts to them, so one that ends early adds to what others hold: in
    one of a few runs by half as much again.
    """
    try:
        job = job_for(program, "replicas=1" if kind == "alone" else f"{kind}={workers}", STEPS)
        engine.refuse(job)
        seen = [engine.run(job, unwatched).account.workers for _ in range(RUNS)]
    except PacelineError:  # a worker may be the first to find out
        return None
    return min((max(each, key=_held) for each in seen), key=_held)


def _held(worker: WorkerFigures) -> int:
    return worker.peak_memory_bytes or 0
