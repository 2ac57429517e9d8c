"""Plans of a program for this host by closed forms, each corrected by a short run of the same kind of worker.

::

    compute      predicted + (the run's measured compute - its closed form) · passes of the plan / passes of the run
    the rest     predicted + (the rest of the run's measured step - its closed form)
    either       predicted · measured / closed form, where the run took less: operators were timed on a busier machine

The components of a step are measured one by one on processes that are as busy as its workers will be.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median

import numpy as np

from paceline.comm.fork_server import ForkServer
from paceline.core.types import Seconds
from paceline.engine.base import Budget, Job
from paceline.engine.dry_run import dry_run
from paceline.engine.run_context import first_batch
from paceline.engine.step_profile.forecast import forecast, update_s
from paceline.planner.base import Arrangement, Cost, Plan
from paceline.planner.program.measured_workload import MeasuredWorkload, cluster_of
from paceline.planner.program.profile import Busy, Pieces, Profile, kind
from paceline.planner.search.objective import Objectives
from paceline.planner.search.search import search
from paceline.program import Program
from paceline.strategy import Strategy


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def job_for(program: Program, strategy: Strategy | str) -> Job:
    """Return the job of a short run of the program.

    Raises:
        InputError: the program can't make a step.
    """
    strategy = Strategy.coerce(strategy)
    draft = Job(program, strategy, Budget("steps", 1, 1))
    step = dry_run(program, first_batch(draft))
    policy = strategy.aggregation.resolved(learning_rate=step.learning_rate, replicas=strategy.replicas)
    return replace(
        draft,
        program=replace(program, metrics=step.metrics, test=None),
        strategy=replace(strategy, aggregation=policy),
        running_buffers=step.running_buffers,
    )


# Terms of a step that the workers of a replica spend together.
STAGED = ("compute", "shards", "bubble", "stages")

# Plans kept of a search for each number of workers, enough for each kind of replica to be among them.
KEPT = 200


def workload_of(program: Program, measured: Profile, workers: int) -> MeasuredWorkload:
    """Return the workload of so many workers that run at the same time; its batch is one replica's, where a program has
    no global one."""
    return MeasuredWorkload(measured, workers, program.global_batch_size or measured.batch)


def host_objectives(program: Program, objectives: Objectives, workers: int) -> Objectives:
    """Return the objectives for up to so many workers of this host."""
    own = program.global_batch_size is None
    return replace(objectives, workers=workers, engine="local", fixed="replica" if own else "global", simulated=KEPT)


def closed_plans(program: Program, measured: Profile, objectives: Objectives, workers: int) -> Iterator[Plan]:
    """Yield the plans with exactly so many workers: operators' times depend on the number of busy workers.

    Args:
        program: to train.
        measured: its profile.
        objectives: from :func:`host_objectives`.
        workers: of all replicas.
    """
    workload, cluster = workload_of(program, measured, workers), cluster_of(measured, workers)
    for plan in search(workload, cluster, replace(objectives, workers=workers)).plans:
        larger = program.global_batch_size is None and accumulates(plan)  # than the program's own batch
        if plan.strategy is not None and plan.arrangement.workers == workers and not larger:
            yield corrected(plan, measured)


def once(plans: Sequence[Plan]) -> Sequence[Plan]:
    """Drop plans that recompute, where others fit, and plans that accumulate, where the same arrangement does without:
    both take time only to save memory."""
    plans = [plan for plan in plans if plan.arrangement.recompute == "none"] or plans
    mesh = attrgetter("arrangement.replicas", "arrangement.stages", "arrangement.shards")
    whole = {mesh(plan) for plan in plans if not accumulates(plan)}
    return [plan for plan in plans if not accumulates(plan) or mesh(plan) not in whole]


def accumulates(plan: Plan) -> bool:
    """Return whether a worker's step is several passes that are summed."""
    return plan.strategy is not None and plan.strategy.accumulate > 1


def staged_s(cost: Cost) -> Seconds:
    """Sum the seconds of a replica's workers together."""
    return sum(cost.terms[name] for name in STAGED)


def passes(arrangement: Arrangement) -> int:
    """Count the successive passes of micro-batches: in a pipeline those through all its stages, m + p - 1.

    >>> passes(Arrangement(stages=2, micro_batches=4)), passes(Arrangement(replicas=2)), passes(Arrangement())
    (5, 1, 1)
    """
    return arrangement.micro_batches + arrangement.accumulated * (arrangement.stages - 1)


def corrected(plan: Plan, measured: Profile) -> Plan:
    """Return the plan with its step and memory corrected by the short run of its kind."""
    arrangement, cost = plan.arrangement, plan.cost
    run = measured.runs.get(kind(arrangement))
    added = 0.0
    if run is not None:
        # compute grows with the passes through the stages; the rest of a step (messages, update) does not
        compute_s, run_compute_s = staged_s(cost), run.pieces.compute_s
        added = correction_s(
            compute_s, run.closed_compute_s, run_compute_s, passes(arrangement) / passes(run.arrangement)
        )
        closed_rest_s, run_rest_s = run.closed_s - run.closed_compute_s, run.step_s - run_compute_s
        added += correction_s(cost.step_s - compute_s, closed_rest_s, run_rest_s)
    terms = {**cost.terms, "waiting": cost.terms["waiting"] + added}
    # replicas of one worker have no optimizer: the server, which holds A, has it
    on_server, context = kind(arrangement) in ("alone", "replicas"), measured.context_bytes(arrangement)
    memory = tuple(
        replace(each, context=context, optimizer=0.0 if on_server else each.optimizer) for each in cost.memory
    )
    scale = (cost.step_s + added) / cost.step_s
    return replace(
        plan,
        cost=replace(cost, terms=terms, memory=memory),
        low_s=plan.low_s * scale,
        high_s=plan.high_s * scale,
        samples_per_s=plan.samples_per_s / scale,
        utilisation=None if plan.utilisation is None else plan.utilisation / scale,
    )


def correction_s(predicted_s: Seconds, run_predicted_s: Seconds, run_s: Seconds, share: float = 1.0) -> Seconds:
    """Return the seconds to add to a predicted time, given a run's predicted and measured times.

    Args:
        predicted_s: the time to correct.
        run_predicted_s: the run's predicted time.
        run_s: the run's measured time; below 0 as 0.
        share: factor of the run's excess.

    >>> correction_s(3.0, 1.0, 1.5), correction_s(3.0, 1.0, 1.5, 2.0)
    (0.5, 1.0)
    >>> correction_s(3.0, 1.0, 0.5), correction_s(3.0, 1.0, -2.0)
    (-1.5, -3.0)
    """
    if run_s >= run_predicted_s:
        return share * (run_s - run_predicted_s)
    # a ratio, not a difference: the corrected time must not fall below 0
    return -predicted_s * (1.0 - (run_s / run_predicted_s if run_s > 0 else 0.0))


# Passes at the least for quantiles of 5 and 95 %.
SPREADS_WITH = 9


def pieces_of(job: Job, fork_server: ForkServer, busy: Busy) -> Pieces:
    """Measure the components of a job's step.

    Args:
        job: a short run.
        fork_server: starts its processes.
        busy: the spread of passes, where too few are measured here.

    Raises:
        InputError: the model can't be cut or divided as the strategy says.
        WorkerError: a process failed.
    """
    components = forecast(job, fork_server)
    passes, low, high = components.compute_s, busy.low, busy.high
    compute_s = median(passes)
    if len(passes) >= SPREADS_WITH:
        low, high = (float(each) / compute_s for each in np.quantile(list(passes), (0.05, 0.95)))
    updated_s = update_s(job, job.strategy.replicas, components.steps_on)
    return Pieces(compute_s, components.pull_s + components.push_s, updated_s, min(low, 1.0), max(high, 1.0))
