"""How fast a policy goes with replicas that take different times: by equations, or by simulating its updates alone.

>>> found = waiting("synchronous", 8, 0.1, "fraction=0.5 exponential:mean=0.1")
>>> f"{found.step_s(8):.3f} s instead of {found.batch_s:.3f} s"
'0.308 s instead of 0.100 s'
>>> f"{waiting('asynchronous', 8, 0.1, 'fraction=0.5 exponential:mean=0.1').step_s(8):.3f} s"
'0.133 s'

With replicas that are slow at times, every F that can be had competes with waiting for all of them.

A plan under a policy takes, for as many batches as there are replicas, what pace.py says; what that is more than its
own step is ``waiting``. Stale Δs are worth less where the objective counts that (:meth:`Objectives.efficiency`). A
policy that changes on its way has the pace of a run that ends when it has changed, simulated from its start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from paceline.aggregation import Aggregation, SmoothSwitch, Synchronous, parse, text_of
from paceline.clock.distributions import Constant, Distribution
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.planner.base import Plan, Workload
from paceline.planner.closed_forms import Team, foretold
from paceline.planner.cluster import Cluster
from paceline.planner.policy_simulation import Pace, Simulation
from paceline.planner.search import carried
from paceline.planner.search.objective import Objectives

__all__ = [
    "Pace",
    "pace",
    "waiting",
]


ARRIVALS = 20_000
"""That :func:`waiting` lets happen; at least so many of each replica:"""
ARRIVALS_EACH = 8
_FORGOTTEN = 0.1


def waiting(
    policy: str, replicas: int, step_s: Seconds, delay: str | None = None, *, arrivals: int | None = None
) -> Pace:
    """The pace of replicas that all take the same time for a batch, but for a delay that some of them have.

    By equations where there are any, else simulated over 20,000 arrivals: the mean time of an update is then off by
    about 1 % where delays are as noisy as exponential ones. A simulation of thousands of replicas takes seconds.

    Args:
        policy: as written for a strategy, ``buffered:k=4``.
        replicas: P.
        step_s: of a batch, seconds.
        delay: as written for ``--delay``: ``fraction=0.5 normal:mean=0,std=0.25``, in seconds; None: no delay.
        arrivals: Δs of a whole run, to be simulated from its start: a policy that changes on its way, as smooth-switch
            does, has a pace over a run alone. None: how it goes on after 2,000.

    Raises:
        InputError: a text that can't be read, or a policy that needs what only training tells.

    >>> calm = waiting("synchronous", 4, 0.1)
    >>> calm.batches, round(calm.step_s(4), 9), round(calm.waiting_s(4), 9)
    (4, 0.1, 0.0)
    >>> round(waiting("synchronous", 4, 0.1, "fraction=0.25 constant:value=0.2").waiting_s(4), 9)
    0.2
    """
    return _remembered(policy, replicas, step_s, delay, arrivals)


@lru_cache(maxsize=4096)
def _remembered(text: str, replicas: int, step_s: Seconds, delay: str | None, arrivals: int | None) -> Pace:
    times, late, policy = Times(compute=Constant(step_s)), Delay.parse(delay) if delay else None, parse(text)
    count = arrivals if arrivals is not None else max(ARRIVALS, ARRIVALS_EACH * replicas)
    _refuse(policy, replicas, times, count)
    resolved = policy.resolved(learning_rate=None, replicas=replicas)
    known = foretold(resolved, Team(replicas, step_s, late))
    if known is not None:
        return known
    return pace(policy, replicas, times, late, arrivals=count, forgotten=_FORGOTTEN if arrivals is None else 0.0)


def pace(
    policy: Aggregation[Any],
    replicas: int,
    compute: Distribution | Times,
    delay: Delay | None = None,
    *,
    updates: int | None = None,
    arrivals: int = 100_000,
    seed: int = 0,
    forgotten: float = 0.1,
) -> Pace:
    """Simulate a policy.

    Args:
        policy: any whose needs are nothing but arrivals.
        replicas: P.
        compute: of one batch; or times of messages and updates as well, none of them measured.
        delay: of some of the replicas.
        updates: to stop after; None: after so many ``arrivals``.
        arrivals: Δs that reach the coordinator.
        seed: of all draws.
        forgotten: the share of the run, from its start, that does not count: how it begins is not how it goes on.

    Returns:
        Means over what counts.

    Raises:
        InputError: a policy that needs a loss or a gradient, times that are measured, or nothing to simulate.

    >>> from paceline.aggregation import Asynchronous
    >>> found = pace(Asynchronous(), 4, Constant(0.1), updates=1000)
    >>> round(found.update_s, 9), found.staleness, found.batches
    (0.025, 3.0, 1.0)
    """
    times = compute if isinstance(compute, Times) else Times(compute=compute)
    _refuse(policy, replicas, times, arrivals if updates is None else updates)
    resolved = policy.resolved(learning_rate=None, replicas=replicas)
    simulation = Simulation(resolved, replicas, times, delay, seed)
    whole = arrivals if updates is None else updates
    began = simulation.seen()
    if forgotten:
        _until(simulation, round(whole * forgotten), by_updates=updates is not None)
        began = simulation.seen()
    _until(simulation, whole, by_updates=updates is not None)
    assert not isinstance(times.compute, str), "it was refused"
    return began.pace(simulation.seen(), simulation.micro_steps, times.compute.mean_s)


def _until(simulation: Simulation, count: int, *, by_updates: bool) -> None:
    """And at least one update, for means need one."""
    least = simulation.updates + 1
    while (simulation.updates if by_updates else simulation.arrivals) < count or simulation.updates < least:
        simulation.turn()


def _refuse(policy: Aggregation[Any], replicas: int, times: Times, length: int) -> None:
    if replicas < 1 or length < 1:
        raise InputError(f"{replicas} replicas for {length} updates or arrivals; write at least 1 of each.")
    if policy.needs:
        raise InputError(
            f"{text_of(policy)} goes by {', '.join(sorted(policy.needs))}, which only training tells; write a policy "
            "that goes by arrivals alone, as buffered:k=4."
        )
    if "measured" in (times.compute, times.transfer, times.apply):
        raise InputError(f"times={str(times)!r}: nothing is computed here to be measured; write compute=0.01, say.")


ENTERED = 8
"""Of each number of replicas so many of the best without delays are looked at."""


SWITCH_EVERY = 500
"""Δs between two steps of smooth-switch's K, as where nothing is said."""


class Paced(NamedTuple):
    """A plan under a policy."""

    plan: Plan
    pace: Pace


def compete(plans: Iterable[Plan], workload: Workload, cluster: Cluster, asked: Objectives) -> list[Plan]:
    """All plans under all policies, best first.

    Args:
        plans: without delays, synchronous.
        workload: what is trained.
        cluster: on what.
        asked: with a delay.
    """
    paced = [found for plan in plans for policy in policies(plan, cluster) if (found := under(plan, policy, asked))]
    return [each.plan for each in sorted(paced, key=lambda each: seconds_of_a_sample(each, workload, asked))]


def policies(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """That could carry it: some backups, K of P, whose others go on or are cancelled, nobody waits, a bound on
    staleness, switching, local steps."""
    replicas = plan.arrangement.replicas
    yield "synchronous"
    if replicas == 1 or not loose(plan, cluster):
        return
    yield from (f"synchronous:backups={b}" for b in sorted({1, replicas // 10, replicas // 4}) if 0 < b < replicas)
    few = sorted({replicas // 4, replicas // 2})
    most = sorted({replicas // 2, replicas * 3 // 4, replicas - 1})
    yield from (f"buffered:k={k}" for k in few if 1 < k < replicas)
    yield from (f"buffered:k={k},cancel=true" for k in most if 1 <= k < replicas)
    yield from ("asynchronous", "stale-synchronous:bound=3", f"smooth-switch:every={SWITCH_EVERY}")
    if plan.strategy is not None and plan.strategy.accumulate == 1:  # replicas that take own steps send no gradients
        yield "local-steps:period=8"


def loose(plan: Plan, cluster: Cluster) -> bool:
    """Whether other policies than the synchronous one are carried: on one host, by processes that share A."""
    arrangement = plan.arrangement
    if arrangement.workers > cluster.devices_per_host or arrangement.divided:
        return False
    if cluster.device.kind == "cuda" and carried.pipelined(arrangement):
        return False
    return carried.engine_of(arrangement, 2**62) == "local"


def under(plan: Plan, policy: str, asked: Objectives) -> Paced | None:
    """A plan with the time that a policy takes; None where the policy can't be had with so many replicas."""
    assert plan.strategy is not None, "search proposes what is carried alone"
    replicas, before = plan.arrangement.replicas, plan.cost.step_s
    try:
        pace = waiting(policy, replicas, before, str(asked.delay), arrivals=arrivals(policy, replicas))
    except InputError:
        return None
    step_s = pace.step_s(replicas)
    terms = {**plan.cost.terms, "waiting": plan.cost.terms["waiting"] + step_s - before}
    times = step_s / before
    found = replace(
        plan,
        cost=replace(plan.cost, terms=terms),
        low_s=plan.low_s * times,
        high_s=plan.high_s * times,
        samples_per_s=plan.samples_per_s / times,
        utilisation=None if plan.utilisation is None else plan.utilisation / times,
        strategy=replace(plan.strategy, aggregation=parse(policy)),
        provenance={**plan.provenance, "waiting": _told(pace, asked)},
    )
    return Paced(found, pace)


def arrivals(policy: str, replicas: int) -> int | None:
    """Δs of a run that ends when a policy has changed from nobody waits to all wait; None: it goes on as it is.

    >>> arrivals("smooth-switch:every=500", 4), arrivals("asynchronous", 4)
    (2000, None)
    """
    match parse(policy):
        case SmoothSwitch(every=int() | float() as every):
            return round(every * replicas)
    return None


def _told(pace: Pace, asked: Objectives) -> str:
    how = f"with --delay {str(asked.delay)!r}: {pace.batches:.3g} Δs an update, {pace.staleness:.2f} updates old"
    unsaid = "" if asked.counts or pace.staleness == 0 else "; what staleness costs is not counted in samples a second"
    return how + unsaid


def seconds_of_a_sample(paced: Paced, workload: Workload, asked: Objectives) -> tuple[float, float, bool]:
    """That counts; then bytes; then whether it is something else than synchronous."""
    plan, pace = paced
    of_update = plan.arrangement.samples * pace.batches / plan.arrangement.replicas
    worth = asked.efficiency(of_update, workload.global_batch, pace.staleness + plan.cost.staleness)
    held = plan.cost.most.total
    seconds = 1 / (plan.samples_per_s * worth)
    strict = plan.strategy is not None and plan.strategy.aggregation == Synchronous()
    first, second = (held, seconds) if asked.objective == "memory" else (seconds, held)
    return float(f"{first:.9e}"), second, not strict
