"""Simulated paces: beside the equations at 10^5 updates, beside the virtual engine, and beside what is told at once."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paceline import train
from paceline.aggregation import parse
from paceline.clock import parse as distribution
from paceline.clock.cluster_file import Links
from paceline.clock.distributions import Constant, Exponential
from paceline.clock.network import Absence, Failures, Network
from paceline.clock.times import Delay, Times
from paceline.core.errors import InputError
from paceline.planner.order_statistics import IdenticalReplicas, expected_s, identical
from paceline.planner.policies import Pace, pace, waiting
from paceline.planner.policy_pace import DelayedReplicas, Simulation, predicted_pace
from tests.engine import programs
from tests.planner.equations import equations

BOUND = 0.01
"""1 %: three standard errors of a mean over as many updates as :func:`simulated` lets happen, or more."""
WARM_UP = 0.1
UPDATES = 100_000
"""For times that vary as much as an exponential's mean: 90,000 count."""

EXPONENTIAL, SHIFTED, PARETO = "exponential:mean=2", "shifted-exponential:shift=1,mean=0.5", "pareto:scale=1,shape=3"
KINDS = (EXPONENTIAL, SHIFTED, PARETO)


def simulated(policy: str, replicas: int, kind: str, spread: float = 1.0) -> Pace:
    """Over as many updates as bring the standard error of their mean to a third of the bound.

    Args:
        policy: what decides.
        replicas: P.
        kind: of times.
        spread: of the time of an update, its standard deviation over its mean, at the most.
    """
    updates = math.ceil((3 * spread / BOUND) ** 2 / (1 - WARM_UP))
    return pace(parse(policy), replicas, distribution(kind), updates=updates, warm_up=WARM_UP)


def spread_of_last(kind: str, k: int, replicas: int) -> float:
    """Of the k-th of so many: its mean and its mean square are integrals of P(X > x) and of 2 x P(X > x)."""
    each = [identical(replicas, distribution(kind))]
    mean, square = expected_s(k, each), expected_square(k, each[0])
    return math.sqrt(square - mean * mean) / mean


def expected_square(k: int, group: IdenticalReplicas) -> float:
    """E[X²] is what is expected of times whose P(X > x) is that of X at √x."""
    rooted = IdenticalReplicas(
        group.replicas, lambda x: group.survival(np.sqrt(x)), tuple(m * m for m in group.marks), group.power
    )
    return expected_s(k, [rooted._replace(power=group.power / 2)])


# ------------------------------------------------------------------------------------------------- beside the equations


@pytest.mark.parametrize("kind", KINDS)
def test_synchronous(kind: str) -> None:
    found = simulated("synchronous", 3, kind, spread_of_last(kind, 3, 3))
    assert found.update_s == pytest.approx(equations.synchronous_s(distribution(kind), 3), rel=BOUND)
    assert (found.batches, found.staleness, found.fresh, found.discarded) == (3, 0, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_k_sync(kind: str) -> None:
    found = simulated("buffered:k=2,cancel=true", 4, kind, spread_of_last(kind, 2, 4))
    assert found.update_s == pytest.approx(equations.k_sync_s(distribution(kind), 2, 4), rel=BOUND)
    assert (found.batches, found.staleness, found.fresh, found.discarded) == (2, 0, 1, 0.5)


def test_k_batch_sync() -> None:
    found = simulated("buffered:k=2,hold=false,cancel=true", 4, EXPONENTIAL, 1 / math.sqrt(2))  # a sum of two
    assert found.update_s == pytest.approx(equations.k_batch_sync_s(Exponential(2.0), 2, 4), rel=BOUND)
    assert found.staleness == 0


@pytest.mark.parametrize("kind", KINDS)
def test_k_async(kind: str) -> None:
    found = simulated("buffered:k=2", 5, kind, spread_of_last(kind, 1, 1))
    exact = equations.order_statistic_s(distribution(kind), 2, 5)
    if kind == EXPONENTIAL:
        assert found.update_s == pytest.approx(equations.k_async_s(Exponential(2.0), 2, 5), rel=BOUND)
        assert found.fresh == pytest.approx(equations.k_async_fresh(2, 5), rel=BOUND)
    if kind == SHIFTED:
        assert found.update_s < 0.99 * exact  # who has computed for long is soon done
    assert found.update_s > equations.k_batch_async_s(distribution(kind), 2, 5) * (1 - BOUND)  # who never waits
    assert found.staleness == pytest.approx(equations.k_async_staleness(2, 5), rel=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_k_batch_async(kind: str) -> None:
    found = simulated("buffered:k=3,hold=false", 5, kind, spread_of_last(kind, 1, 1) / math.sqrt(3))
    assert found.update_s == pytest.approx(equations.k_batch_async_s(distribution(kind), 3, 5), rel=BOUND)
    assert found.staleness == pytest.approx(equations.k_batch_async_staleness(3, 5), rel=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous(kind: str) -> None:
    found = simulated("asynchronous", 8, kind, spread_of_last(kind, 1, 1))
    assert found.update_s == pytest.approx(equations.asynchronous_s(distribution(kind), 8), rel=BOUND)
    assert found.staleness == pytest.approx(7, rel=BOUND)
    assert (found.batches, found.discarded) == (1, 0)


# N and the length of a window vary less than in the third case: by 0.44 of their mean in the first, as (1 - p) / (P p)
# is 0.19 there with p = 1 - e^{-1/2}, and by less than 0.2 in the second.
@pytest.mark.parametrize(("replicas", "seconds", "spread"), [(8, 1.0, 0.5), (8, 4.0, 0.3), (3, 0.2, 1.0)])
def test_a_deadline(replicas: int, seconds: float, spread: float) -> None:
    """Exponential times have no memory, so who is late begins each window anew.

    N of P have arrived after T with P(N = n) binomial in 1 - e^{-T/m}. A window ends early where all P have, and late
    where nobody has: m / P later, with one Δ.
    """
    arrived, nobody = 1 - math.exp(-seconds / 2.0), math.exp(-replicas * seconds / 2.0)
    # The mean of the smaller of T and the last arrival: the integral of P(last > t) up to T.
    mean_s = nobody * 2.0 / replicas
    for j in range(1, replicas + 1):
        mean_s += math.comb(replicas, j) * (-1) ** (j + 1) * 2.0 / j * (1 - math.exp(-j * seconds / 2.0))
    found = simulated(f"deadline:seconds={seconds}", replicas, EXPONENTIAL, spread)
    assert found.update_s == pytest.approx(mean_s, rel=BOUND)
    assert found.batches == pytest.approx(replicas * arrived + nobody, rel=BOUND)
    assert found.discarded == 0


@pytest.mark.parametrize("backups", [1, 2])
def test_backups(backups: int) -> None:
    k = 4 - backups
    found = simulated(f"synchronous:backups={backups}", 4, EXPONENTIAL, spread_of_last(EXPONENTIAL, k, 4))
    # K-sync's updates are sums of fewer of the same exponential waits, and so vary more
    assert found.update_s == pytest.approx(equations.backups_s(Exponential(2.0), backups, 4), rel=BOUND)
    assert found.batches == 4 - backups
    assert 0 < found.discarded < backups / 4


def test_stale_synchronous_without_slack_is_synchronous() -> None:
    found = simulated("stale-synchronous:bound=0", 4, EXPONENTIAL)
    assert found.step_s(4) == pytest.approx(equations.synchronous_s(Exponential(2.0), 4), rel=2 * BOUND)
    # 25,000 rounds of 4 updates: a standard error of 0.4 %


@pytest.mark.parametrize("bound", [1, 3])
def test_stale_synchronous_is_its_recurrence(bound: int) -> None:
    """Both go through the same draws; they stop at different clocks, which is worth a few of thousands."""
    team = DelayedReplicas(4, 1.0, Delay.parse("fraction=0.5 exponential:mean=2"))
    exact = predicted_pace(parse(f"stale-synchronous:bound={bound}"), team)
    assert exact is not None
    found = pace(parse(f"stale-synchronous:bound={bound}"), 4, Constant(1.0), team.delay, updates=UPDATES // 2)
    assert found.update_s == pytest.approx(exact.update_s, rel=BOUND)
    assert found.staleness == pytest.approx(exact.staleness, rel=BOUND)


OWN_DELAYS = (
    None,
    "fraction=0.5 constant:value=0.3",
    "fraction=0.5 exponential:mean=0.3",
    "fraction=1 shifted-exponential:shift=0.1,mean=0.2",
)


@pytest.mark.parametrize("delay", OWN_DELAYS)
@pytest.mark.parametrize("period", [1, 4])
def test_own_steps_of_replicas_that_are_late(period: int, delay: str | None) -> None:
    policy = f"local-steps:period={period}"
    exact = waiting(policy, 6, 0.1, delay)
    found = pace(parse(policy), 6, Constant(0.1), Delay.parse(delay) if delay else None, arrivals=30_000)
    assert exact.updates == 0
    assert found.update_s == pytest.approx(exact.update_s, rel=2 * BOUND)  # 4,500 rounds: a standard error of 0.9 %
    assert (found.batches, found.staleness) == (exact.batches, exact.staleness)


def test_own_steps_of_other_distributions_are_simulated() -> None:
    assert waiting("local-steps:period=4", 4, 0.1, "fraction=1 pareto:scale=0.1,shape=3").updates > 0


def test_own_steps() -> None:
    found = pace(parse("local-steps:period=4"), 3, Exponential(2.0), updates=UPDATES // 4)
    assert found.update_s == pytest.approx(equations.local_steps_s(Exponential(2.0), 4, 3), rel=BOUND)
    assert found.batches == 12


# -------------------------------------------------------------------------------------------- beside the virtual engine


SIMULATED = [
    "synchronous",
    "synchronous:backups=1",
    "asynchronous",
    "buffered:k=2",
    "buffered:k=2,cancel=true",
    "buffered:k=3,hold=false,cancel=true",
    "stale-synchronous:bound=1",
    "smooth-switch:every=20",
    "local-steps:period=3",
    "elastic-averaging:period=2,elasticity=0.1",
]


@pytest.mark.parametrize("policy", SIMULATED)
def test_the_virtual_engine_goes_through_the_same_events(policy: str) -> None:
    program = programs.program(train=programs.data(samples=64))  # 4 whole rounds an epoch: no Δ is without samples
    delay = Delay.parse("fraction=0.5 exponential:mean=0.2")
    times = Times.parse("compute=exponential:mean=0.1 transfer=exponential:mean=0.01")
    settings: dict[str, Any] = {"engine": "virtual", "times": str(times), "delay": str(delay), "progress": False}
    summary = train(program, f"replicas=4 aggregation={policy}", seconds=12, **settings).summary
    simulation = Simulation(parse(policy), 4, times, delay, program.seed)
    while simulation.coordinator.tally.gradients < summary["gradients"]:
        simulation.turn()
    now_s, updates, applied, stale, _, arrived, cancelled = simulation.counts()
    assert arrived > 20
    assert (updates, cancelled) == (summary["updates"], summary["cancelled"])
    assert stale / applied == pytest.approx(summary["staleness_mean"], rel=1e-12)  # the same integers
    assert now_s <= 12


LINKS = Links(inside_bytes_per_s=1e5, between_bytes_per_s=1e4, latency_s=0.01, between_latency_s=0.02)


@pytest.mark.parametrize("policy", SIMULATED)
def test_and_over_a_network_too(policy: str) -> None:
    """With queues, two servers, and hosts that come and go."""
    program = programs.program(train=programs.data(samples=64))
    network = Network(3, LINKS, (Absence(2, 3.0, 5.0),), Failures(10.0, 1.0))
    times = Times(distribution("exponential:mean=0.1"), apply=distribution("0.01"), network=network)
    settings: dict[str, Any] = {"engine": "virtual", "times": times, "progress": False}
    run = train(program, f"replicas=4 servers=2 aggregation={policy}", seconds=30, **settings)
    a_bytes = sum(p.numel() * p.element_size() for p in program.build().parameters())
    simulation = Simulation(parse(policy), 4, times, None, program.seed, a_bytes, servers=2)
    while simulation.coordinator.tally.gradients < run.summary["gradients"]:
        simulation.turn()
    now_s, updates, applied, stale, _, arrived, cancelled = simulation.counts()
    assert arrived > 20
    assert len(run.left) > 2
    assert (updates, cancelled) == (run.summary["updates"], run.summary["cancelled"])
    assert stale / applied == pytest.approx(run.summary["staleness_mean"], rel=1e-12)
    assert now_s <= 30


def test_a_policy_without_a_model_has_the_times_of_its_network() -> None:
    network = Network(2, Links(100.0, 10.0, 0.25, 0.5))
    times = Times(Constant(1.0), apply=Constant(0.5), network=network)
    found = pace("synchronous", 2, times, size_bytes=20, servers=1, updates=50, warm_up=0.0)
    assert found.update_s == pytest.approx(2.5 + 1 + 2.5 + 0.5)
    found = pace("synchronous", 2, times, size_bytes=20, updates=50, warm_up=0.0)
    assert found.update_s == pytest.approx(1.5 + 1 + 1.5 + 0.25)


@pytest.mark.parametrize(
    ("times", "given", "words"),
    [
        (Times(network=Network(1, LINKS)), {}, "size_bytes=None: a network sends messages of a size"),
        (Times(), {"size_bytes": 4e6}, "size_bytes=4000000.0: a network sends messages of a size"),
        (Times(network=Network(1, LINKS)), {"size_bytes": 0}, "size_bytes=0, but it must be a number above 0"),
        (Times(), {"servers": 2}, "servers=2 have a slice of A each"),
        (Times(network=Network(2, LINKS, (Absence(1, 3.0),))), {"size_bytes": 8}, "host 1 has a server of A, and goes"),
    ],
)
def test_networks_that_are_refused(times: Times, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pace("asynchronous", 2, times, **given)


def test_servers_that_take_time_hold_replicas_up() -> None:
    busy = Times.parse("compute=0.1 apply=0.05 gradient=0.01")
    assert pace(parse("asynchronous"), 8, busy, updates=500).update_s == pytest.approx(0.06)
    assert pace(parse("synchronous"), 8, busy, updates=500).update_s == pytest.approx(0.1 + 0.05 + 8 * 0.01)


# ------------------------------------------------------------------------------------------------------ told at once

DELAYS = (
    None,
    "fraction=0.5 normal:mean=0,std=0.25",
    "fraction=0.25 exponential:mean=0.3",
    "fraction=1 pareto:scale=0.1,shape=3",
)


@pytest.mark.parametrize(
    "policy", ["synchronous", "asynchronous", "buffered:k=3,cancel=true", "buffered:k=5,hold=false", "buffered:k=8"]
)
@pytest.mark.parametrize("delay", DELAYS)
def test_equations_are_what_is_simulated(policy: str, delay: str | None) -> None:
    exact = waiting(policy, 8, 0.1, delay)
    found = pace(parse(policy), 8, Constant(0.1), Delay.parse(delay) if delay else None, arrivals=60_000)
    assert exact.updates == 0
    assert found.update_s == pytest.approx(exact.update_s, rel=2 * BOUND)  # 6,750 rounds or more: 0.7 % at the most
    assert found.batches == exact.batches
    assert found.staleness == pytest.approx(exact.staleness, rel=BOUND)
    assert found.discarded == pytest.approx(exact.discarded, abs=1e-3)  # rounds that were cut by the first tenth


def test_one_that_is_always_late_holds_up_those_who_wait() -> None:
    late = "fraction=0.25 constant:value=0.3"
    each = {
        policy: waiting(policy, 4, 0.1, late) for policy in ("synchronous", "asynchronous", "buffered:k=3,cancel=true")
    }
    assert each["synchronous"].step_s(4) == pytest.approx(0.4)
    assert each["asynchronous"].step_s(4) == pytest.approx(4 / (3 / 0.1 + 1 / 0.4))
    assert each["buffered:k=3,cancel=true"].update_s == pytest.approx(0.1)


def test_policies_that_change_have_the_pace_of_a_run() -> None:
    """K is 1 for 200 Δs, then 2, 3 and, for the 49,400 that follow, 4."""
    delay = "fraction=0.5 exponential:mean=0.3"
    early, late = (waiting("smooth-switch:every=200", 4, 0.1, delay, arrivals=count) for count in (200, 50_000))
    assert early.batches < 1.01
    assert early.step_s(4) == pytest.approx(waiting("asynchronous", 4, 0.1, delay).step_s(4), rel=0.1)  # of 200 draws
    assert late.batches > 3.9
    assert late.step_s(4) == pytest.approx(waiting("synchronous", 4, 0.1, delay).step_s(4), rel=2 * BOUND)


def test_without_delays_nobody_waits_for_long() -> None:
    for policy in ("synchronous", "asynchronous", "stale-synchronous", "smooth-switch:every=100", "local-steps"):
        assert waiting(policy, 4, 0.1).step_s(4) == pytest.approx(0.1, rel=1e-3)


def test_thousands_of_replicas_are_told_by_equations() -> None:
    found = waiting("synchronous", 4096, 1.0, "fraction=1 exponential:mean=0.1")
    assert found.step_s(4096) == pytest.approx(1 + 0.1 * equations.harmonic(4096))
    stale = waiting("stale-synchronous", 1024, 1.0, "fraction=1 exponential:mean=0.1")
    assert 1.1 < stale.step_s(1024) < waiting("synchronous", 1024, 1.0, "fraction=1 exponential:mean=0.1").step_s(1024)


def test_means_that_are_infinite_are_told_as_such() -> None:
    assert math.isinf(waiting("synchronous", 4, 0.1, "fraction=0.5 pareto:scale=0.1,shape=0.9").update_s)
    assert waiting("asynchronous", 4, 0.1, "fraction=0.5 pareto:scale=0.1,shape=0.9").update_s == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("smooth-switch:adaptive", "only training has"),
        ("buffered:k=9", "can never wait"),
        ("synchronos", "did you mean"),
    ],
)
def test_policies_that_cannot_be_simulated_are_refused(policy: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        waiting(policy, 4, 0.1)


def test_what_is_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(InputError, match="write at least 1"):
        waiting("synchronous", 0, 0.1)
    with pytest.raises(InputError, match="measured"):
        pace(parse("synchronous"), 4, Times.parse("measured"))


def test_the_same_seed_gives_the_same_pace() -> None:
    one, other, third = (pace(parse("buffered:k=3"), 4, Exponential(1.0), updates=500, seed=seed) for seed in (1, 1, 2))
    assert one == other != third


def test_pace_needs_no_torch() -> None:
    """In an interpreter of its own, for this one has torch."""
    modules = ["collective_times", "shapes.gemm_time", "policies", "policy_pace"]
    used = "paceline.planner.policies.waiting('synchronous', 2, 0.1); print('torch' in sys.modules)"
    program = f"import sys; import {', '.join(f'paceline.planner.{each}' for each in modules)}; {used}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
