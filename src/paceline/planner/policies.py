"""Pace of any policy with delayed replicas, by equations or simulated, and the competition of plans under policies.

>>> delayed = waiting("synchronous", 8, 0.1, "fraction=0.5 exponential:mean=0.1")
>>> f"{delayed.step_s(8):.3f} s instead of {delayed.batch_s:.3f} s"
'0.308 s instead of 0.100 s'
>>> f"{waiting('asynchronous', 8, 0.1, 'fraction=0.5 exponential:mean=0.1').step_s(8):.3f} s"
'0.133 s'

A step of a plan under a policy is the time of as many batches as there are replicas; what that is more than its own
step is the term ``waiting``. Stale Δs are worth less where the objective counts that (:meth:`Objectives.efficiency`). A
policy that changes during a run has the pace of a run that ends when it has changed, simulated from its start.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from paceline.aggregation import Aggregation, SmoothSwitch, Synchronous, parse, text_of
from paceline.clock.distributions import Constant, Distribution
from paceline.clock.hosts import refuse_servers
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError, check_positive
from paceline.core.types import Seconds
from paceline.planner.base import Plan, Workload
from paceline.planner.cluster import Cluster
from paceline.planner.policy_pace import DelayedReplicas, Pace, Simulation, predicted_pace
from paceline.planner.search import supported
from paceline.planner.search.objective import Objectives

__all__ = ["Pace", "pace", "waiting"]

# Arrivals that waiting simulates; at least so many of each replica:
ARRIVALS = 20_000
ARRIVALS_EACH = 8
_WARM_UP = 0.1


@lru_cache(maxsize=4096)
def waiting(
    policy: str, replicas: int, step_s: Seconds, delay: str | None = None, *, arrivals: int | None = None
) -> Pace:
    """Return the pace of replicas that all take the same time for a batch, but for a delay that some of them have.

    By equations where there are any, else simulated over 20,000 arrivals: the mean time of an update is then about 1 %
    off where delays are as noisy as exponential ones. A simulation of thousands of replicas takes seconds.

    Args:
        policy: as written for a strategy, ``buffered:k=4``.
        replicas: P.
        step_s: of a batch, seconds.
        delay: as written for ``--delay``: ``fraction=0.5 normal:mean=0,std=0.25``, in seconds; None: no delay.
        arrivals: Δs of a whole run, to be simulated from its start: a policy that changes during a run, as
            smooth-switch does, has a pace over a run alone. None: the steady pace after 2,000.

    Raises:
        InputError: a text that can't be read, or a policy that needs a loss or a gradient.

    >>> calm = waiting("synchronous", 4, 0.1)
    >>> calm.batches, round(calm.step_s(4), 9)
    (4, 0.1)
    >>> round(waiting("synchronous", 4, 0.1, "fraction=0.25 constant:value=0.2").step_s(4), 9)
    0.3
    """
    times, late, parsed = Times(compute=Constant(step_s)), Delay.parse(delay) if delay else None, parse(policy)
    count = arrivals if arrivals is not None else max(ARRIVALS, ARRIVALS_EACH * replicas)
    _refuse(parsed, replicas, times, count)
    resolved = parsed.resolved(learning_rate=None, replicas=replicas)
    predicted = predicted_pace(resolved, DelayedReplicas(replicas, step_s, late))
    if predicted is not None:
        return predicted
    return pace(parsed, replicas, times, late, arrivals=count, warm_up=_WARM_UP if arrivals is None else 0.0)


def pace(
    policy: Aggregation[Any] | str,
    replicas: int,
    times: Distribution | Times | str,
    delay: Delay | str | None = None,
    *,
    size_bytes: float | None = None,
    servers: int | None = None,
    updates: int | None = None,
    arrivals: int = 100_000,
    seed: int = 0,
    warm_up: float = 0.1,
) -> Pace:
    """Simulate a policy in virtual time, without a model: 10,000 replicas send a million Δs in less than a minute.

    Args:
        policy: any that needs nothing but arrivals, or its text.
        replicas: P.
        times: of one batch; or of messages and updates as well, as for :func:`~paceline.train`; none of them measured.
        delay: of some of the replicas, or its text.
        size_bytes: of A and of a Δ, where ``times`` has a network.
        servers: n, among which A is divided, where ``times`` has a network; None: as many as hosts.
        updates: to stop after; None: after so many ``arrivals``.
        arrivals: Δs that reach the coordinator.
        seed: of all draws.
        warm_up: the share of the run, from its start, that does not count.

    Returns:
        Means over the events that count.

    Raises:
        InputError: a text that can't be read, a policy that needs a loss or a gradient, times that are measured, a
            network without ``size_bytes`` or the reverse, or nothing to simulate.

    >>> steady = pace("asynchronous", 4, "compute=0.1", updates=1000)
    >>> round(steady.update_s, 9), steady.staleness, steady.batches
    (0.025, 3.0, 1.0)
    """
    policy = parse(policy) if isinstance(policy, str) else policy
    times = Times.parse(times) if isinstance(times, str) else times
    times = times if isinstance(times, Times) else Times(compute=times)
    delay = Delay.parse(delay) if isinstance(delay, str) else delay
    whole = arrivals if updates is None else updates
    _refuse(policy, replicas, times, whole)
    _refuse_network(times, size_bytes, servers)
    resolved = policy.resolved(learning_rate=None, replicas=replicas)
    simulation = Simulation(resolved, replicas, times, delay, seed, size_bytes or 0.0, servers)

    def run_until(count: int) -> None:
        coordinator = simulation.coordinator
        least = coordinator.version + 1  # means need at least one
        while (
            coordinator.version < least
            or (coordinator.tally.gradients if updates is None else coordinator.version) < count
        ):
            simulation.turn()

    if warm_up:
        run_until(round(whole * warm_up))
    begin = simulation.counts()
    run_until(whole)
    assert not isinstance(times.compute, str), "it was refused"
    return simulation.pace_since(begin, times.compute.mean_s)


def _refuse(policy: Aggregation[Any], replicas: int, times: Times, length: int) -> None:
    if replicas < 1 or length < 1:
        raise InputError(f"{replicas} replicas for {length} updates or arrivals; write at least 1 of each.")
    if policy.needs:
        raise InputError(
            f"{text_of(policy)} depends on {', '.join(sorted(policy.needs))}, which only training has; write a policy "
            "that depends on arrivals alone, as buffered:k=4."
        )
    if "measured" in (times.compute, times.transfer, times.apply):
        raise InputError(f"times={str(times)!r}: nothing is computed here to be measured; write compute=0.01, say.")


def _refuse_network(times: Times, size_bytes: float | None, servers: int | None) -> None:
    refuse_servers(times.network, servers)
    if (times.network is None) != (size_bytes is None):
        raise InputError(
            f"times={str(times)!r} and size_bytes={size_bytes}: a network sends messages of a size, and nothing else "
            "has one; write times='compute=0.01 network=cluster.toml' and size_bytes=4e6, or neither."
        )
    if size_bytes is not None:
        check_positive("size_bytes", size_bytes, instead=4e6)


# ---------------------------------------------------------------------------------------------------------- competition

# Δs between two steps of smooth-switch's K: its default.
SWITCH_EVERY = 500


def compete(plans: Iterable[Plan], cluster: Cluster, objectives: Objectives) -> Iterator[tuple[Plan, Pace]]:
    """Yield all plans under all policies, each with its pace.

    Args:
        plans: without delays, synchronous.
        cluster: that they are for.
        objectives: with a delay.
    """
    for plan in plans:
        for policy in policies(plan, cluster):
            if candidate := under(plan, policy, objectives):
                yield candidate


def ranked(candidates: Iterable[tuple[Plan, Pace]], workload: Workload, objectives: Objectives) -> list[Plan]:
    """Return plans with their paces, best first."""
    keyed = [(rank(plan, pace, workload, objectives), plan) for plan, pace in candidates]
    return [plan for _, plan in sorted(keyed, key=lambda each: each[0])]


def policies(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yield the policies to try: some backups, K of P, whose others go on or are cancelled, asynchronous, a bound on
    staleness, switching, local steps of all or of those that are in time.

    Other policies than the synchronous one are those of one host, by processes that share A; with servers on several
    hosts see served_plans.py.
    """
    a = plan.arrangement
    yield "synchronous"
    if a.workers > cluster.devices_per_host or a.divided or supported.engine_of(a, 2**62) != "local":
        return
    yield from loose_policies(plan)


def loose_policies(plan: Plan) -> Iterator[str]:
    """Yield the same but for the synchronous one."""
    replicas = plan.arrangement.replicas
    if replicas == 1:
        return
    yield from (f"synchronous:backups={b}" for b in sorted({1, replicas // 10, replicas // 4}) if 0 < b < replicas)
    few = sorted({replicas // 4, replicas // 2})
    most = sorted({replicas // 2, replicas * 3 // 4, replicas - 1})
    yield from (f"buffered:k={k}" for k in few if 1 < k < replicas)
    yield from (f"buffered:k={k},cancel=true" for k in most if 1 <= k < replicas)
    yield from ("asynchronous", "stale-synchronous:bound=3", f"smooth-switch:every={SWITCH_EVERY}")
    if plan.strategy is not None and plan.strategy.accumulate == 1:  # replicas with local steps send no gradients
        yield from ("local-steps:period=8", "decoupled:period=8")


def under(plan: Plan, policy: str, objectives: Objectives) -> tuple[Plan, Pace] | None:
    """Return a plan with the pace of a policy; None where so many replicas can't have it."""
    assert plan.strategy is not None, "a search with delays has supported plans alone"
    replicas, before = plan.arrangement.replicas, plan.cost.step_s
    try:
        pace = waiting(policy, replicas, before, str(objectives.delay), arrivals=arrivals(policy, replicas))
    except InputError:
        return None
    step_s = pace.step_s(replicas)
    terms = {**plan.cost.terms, "waiting": plan.cost.terms["waiting"] + step_s - before}
    times = step_s / before
    cost, strategy = replace(plan.cost, terms=terms), replace(plan.strategy, aggregation=parse(policy))
    utilisation = None if plan.utilisation is None else plan.utilisation / times
    rates = plan.low_s * times, plan.high_s * times, plan.samples_per_s / times, utilisation
    provenance = {**plan.provenance, "waiting": source(pace, objectives)}
    return Plan(plan.arrangement, cost, *rates, strategy, plan.simulated, provenance, plan.why_not), pace


def source(pace: Pace, objectives: Objectives) -> str:
    """Return where a pace is from, and what an update is made of."""
    delayed = f"with --delay {str(objectives.delay)!r}" if objectives.delay else "without delays"
    text = f"{delayed}: {pace.batches:.3g} Δs an update, {pace.staleness:.2f} updates old"
    stale = not objectives.statistical and pace.staleness
    return text + ("; what staleness costs is not counted in samples a second" if stale else "")


def arrivals(policy: str, replicas: int) -> int | None:
    """Return the Δs of a run that ends when a policy has changed from asynchronous to synchronous; None: it is steady.

    >>> arrivals("smooth-switch:every=500", 4), arrivals("asynchronous", 4)
    (2000, None)
    """
    match parse(policy):
        case SmoothSwitch(every=int() | float() as every):
            return round(every * replicas)
    return None


def rank(plan: Plan, pace: Pace, workload: Workload, objectives: Objectives) -> tuple[float, float, bool]:
    """Return the seconds of an effective sample, peak bytes, and whether it is another policy than synchronous.

    For objective="memory" the first two are swapped.
    """
    # An update has so many of the replicas' batches.
    of_update = plan.arrangement.samples * pace.batches / plan.arrangement.replicas
    worth = objectives.efficiency(of_update, workload.global_batch, pace.staleness + plan.cost.staleness)
    peak_bytes, seconds = plan.cost.peak.total, 1 / (plan.samples_per_s * worth)
    strict = plan.strategy is not None and plan.strategy.aggregation == Synchronous()
    first, second = (peak_bytes, seconds) if objectives.objective == "memory" else (seconds, peak_bytes)
    return float(f"{first:.9e}"), second, not strict
