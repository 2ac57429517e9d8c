"""Virtual time against formulas, at 10^5 updates: Dutta et al. 2018 (arXiv 1803.01113), for exponential times."""

import pytest

from tests.engine.weightless import Weightless

UPDATES = 100_000
BOUND = 0.01
"""1 %. The standard error of a mean over 10^5 updates is about 1/√10^5 = 0.3 % of the spread of one."""


def mean_staleness(run: Weightless) -> float:
    tally = run.coordinator.tally
    return sum(s * n for s, n in tally.staleness.items()) / tally.applied


@pytest.mark.parametrize(("replicas", "k"), [(8, 1), (6, 2), (7, 3)])
def test_mean_staleness_of_k_async(replicas: int, k: int) -> None:
    """Each of P waits in one of every P/K updates on average: P/K - 1 of them pass between a read and its Δ."""
    run = Weightless(f"buffered:k={k}", replicas, "exponential:mean=1").carry(UPDATES)
    assert mean_staleness(run) == pytest.approx(replicas / k - 1, rel=BOUND)


@pytest.mark.parametrize(("replicas", "k"), [(6, 2), (7, 3)])
def test_mean_staleness_of_k_batch_async(replicas: int, k: int) -> None:
    """P - 1 Δs of others arrive between a read and its Δ on average, K to an update."""
    run = Weightless(f"buffered:k={k},hold=false", replicas, "exponential:mean=1").carry(UPDATES)
    assert mean_staleness(run) == pytest.approx((replicas - 1) / k, rel=BOUND)


@pytest.mark.parametrize(("replicas", "k"), [(4, 4), (5, 2), (4, 1)])
def test_time_of_k_sync(replicas: int, k: int) -> None:
    """The K-th of P exponentials: E[X_{K:P}] = mean · (H_P - H_{P-K}), with harmonic numbers H."""
    run = Weightless(f"buffered:k={k},cancel=true", replicas, "exponential:mean=2").carry(UPDATES)
    expected = 2 * sum(1 / i for i in range(replicas - k + 1, replicas + 1))
    assert run.events.now_s / UPDATES == pytest.approx(expected, rel=BOUND)
    assert mean_staleness(run) == 0
    assert len(run.cancelled) == UPDATES * (replicas - k) or k == replicas


def test_time_of_k_batch_sync() -> None:
    """Of P memoryless replicas that go on at once, K Δs arrive in K/P of the mean."""
    run = Weightless("buffered:k=2,hold=false,cancel=true", 4, "exponential:mean=2").carry(UPDATES)
    assert run.events.now_s / UPDATES == pytest.approx(2 * 2 / 4, rel=BOUND)
    assert mean_staleness(run) == 0


def test_time_of_asynchronous() -> None:
    run = Weightless("asynchronous", 8, "exponential:mean=2").carry(UPDATES)
    assert run.events.now_s / UPDATES == pytest.approx(2 / 8, rel=BOUND)
