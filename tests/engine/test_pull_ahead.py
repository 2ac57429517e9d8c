"""Replicas that pull ahead, in virtual time: what they compute, when, and with what network."""

from pathlib import Path
from typing import Any

import pytest

from paceline import Run, train
from tests import oracle
from tests.engine import programs
from tests.engine.served_cases import ROUNDING

STEPS = 9
AHEAD = "aggregation=asynchronous pull_ahead=true"
COMPUTE = 0.1
CLUSTER = """
hosts = 2
[links]
inside_bytes_per_s = 1e12
between_bytes_per_s = {rate}
"""


def run(strategy: str, **settings: Any) -> Run:
    return train(programs.program(), strategy, engine="virtual", progress=False, **{"steps": STEPS} | settings)


def test_each_delta_is_of_the_a_before() -> None:
    """In the first two steps that is A_0."""
    found = run(f"replicas=1 {AHEAD}")
    oracle.assert_same(found.model, oracle.one_exchange_behind(programs.program(), STEPS), ROUNDING)
    assert found.summary["staleness"] == {"0": 1, "1": STEPS - 1}


@pytest.mark.parametrize("transfer", [0.01, 0.05, 0.2])
def test_a_step_takes_as_long_as_what_is_longer(transfer: float) -> None:
    """To compute a Δ, or to push one and pull A; alone both come first and last in turn."""
    found = run(f"replicas=1 {AHEAD}", times=f"compute={COMPUTE} transfer={transfer}", trace=True)
    exchange = 2 * transfer
    assert found.summary["seconds"] == pytest.approx(
        transfer + COMPUTE + (STEPS - 1) * max(COMPUTE, exchange) + transfer, rel=1e-12
    )
    waits = sum(span.end_ns - span.start_ns for span in found.spans if span.action == "wait") * 1e-9
    assert waits == pytest.approx((STEPS - 1) * max(0.0, exchange - COMPUTE), abs=1e-6)  # spans are in nanoseconds


def test_replicas_that_travel_longer_than_they_compute_are_never_idle() -> None:
    """Two of each: the busy time of one is what it computes."""
    found = run(f"replicas=2 {AHEAD}", times=f"compute={COMPUTE} transfer=0.04", steps=50)
    assert min(found.summary["utilisation"]) > 0.97
    plain = run("replicas=2 aggregation=asynchronous", times=f"compute={COMPUTE} transfer=0.04", steps=50)
    assert max(plain.summary["utilisation"]) == pytest.approx(COMPUTE / (COMPUTE + 0.08), rel=0.03)


def test_over_a_network_computing_hides_what_travels(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(rate=1e6))
    given = programs.program().model()
    size = sum(p.numel() * p.element_size() for p in given.parameters())
    exchange = 2 * size / 1e6
    times = {"times": f"compute={3 * exchange} network={path}", "steps": 20}
    plain, ahead = (run(f"replicas=2 aggregation=asynchronous {more}", **times) for more in ("", "pull_ahead=true"))
    assert ahead.summary["seconds"] < plain.summary["seconds"]
    assert ahead.summary["seconds"] == pytest.approx(20 * 3 * exchange + exchange, rel=0.02)


HOST_AWAY = """
[[absences]]
host = 1
from_s = {away}
until_s = 3.0
"""


@pytest.mark.parametrize("away", [0.6, 1.0, 1.4, 1.8])
def test_one_that_comes_back_begins_anew(tmp_path: Path, away: float) -> None:
    """Its host goes while it computes, or waits for the other one; it computes nothing before it is back."""
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(rate=1e9) + HOST_AWAY.format(away=away))
    policy = "aggregation=buffered:k=2 pull_ahead=true"
    found = run(
        f"replicas=2 {policy}",
        times=f"compute=exponential:mean=0.4 network={path}",
        steps=None,
        seconds=6.0,
        trace=True,
    )
    assert [exit_.replica for exit_ in found.left] == [1]
    own = [span for span in found.spans if span.replica == 1]
    pushed = min(span.step for span in own if span.action == "push" and span.start_ns > 3.0e9)
    assert all(span.start_ns >= 3.0e9 for span in own if span.action == "compute" and span.step >= pushed)
