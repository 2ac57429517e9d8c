"""Runs in virtual time that a signal has cut go on bit for bit, under any policy."""

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Program, Run, train
from paceline.aggregation.base import Arrival
from paceline.checkpoint.reader import newest
from paceline.engine.coordinator import Coordinator
from tests import oracle
from tests.engine import programs

Cut = Callable[..., Run]

POLICIES = {
    "synchronous": {},
    "synchronous:backups=1": {},
    "asynchronous": {"noise_scale": True},
    "smooth-switch:every=7": {"on_nonfinite": "skip"},
    "smooth-switch:adaptive": {"noise_scale": True},
    "smooth-switch:loss-driven": {},
    "buffered:k=2,hold=false": {},
    "buffered:k=2,cancel=true": {},
    "stale-synchronous:bound=2": {},
    "asynchronous pull_ahead=true": {"noise_scale": True},
    "delay-compensated:strength=2": {},
    "robust:by=(krum:faulty=0,best=2)": {},
    "deadline:seconds=0.03": {},
    "buffered:k=2,cancel=true pull_ahead=true": {},
    "local-steps:period=3": {},
    "local-steps:period=4,fragments=2,overlap=1,outer=nesterov": {},
    "elastic-averaging:period=2": {},
    "decoupled:period=2,quorum=2,grace=0.9": {},
    "decoupled:period=3,quorum=2,grace=0.9,hold=true": {},
}
TIMES = "compute=normal:mean=0.01,std=0.005 transfer=exponential:mean=0.001 apply=exponential:mean=0.001"
OPTIONS: dict[str, Any] = {"delay": "fraction=0.5 normal:mean=0,std=0.02", "times": TIMES, "progress": False}
SAMPLES = 96


class Normed(nn.Module):
    """With running buffers, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.dropout, self.outer = nn.Dropout(0.2), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(torch.tanh(self.norm(self.inner(x)))))


def program(model: Callable[[], nn.Module] = programs.mlp) -> Program:
    optimizer = functools.partial(torch.optim.NAdam, lr=0.02)
    schedule = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=60)
    data = programs.data(samples=SAMPLES)
    return programs.program(
        model=model, optimizer=optimizer, scheduler=schedule, clip_norm=0.5, train=data, test=data, batch_size=4
    )


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cut:
    """``train`` with checkpoints, which gets a SIGTERM at so many arrivals."""
    arrived, seen, at = Coordinator.arrived, list[int](), [0]

    def counting(coordinator: Coordinator, arrival: Arrival) -> None:
        arrived(coordinator, arrival)
        seen.append(1)
        if len(seen) == at[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(*arguments: Any, arrivals: int, **options: Any) -> Run:
        seen.clear()
        at[0] = arrivals
        return train(*arguments, engine="virtual", checkpoint=tmp_path, resume=True, **options)

    monkeypatch.setattr(Coordinator, "arrived", counting)
    return run


def assert_equal(one: Run, other: Run) -> None:
    oracle.assert_same(one.model, other.state, 0)
    assert [repr(record) for record in one.history] == [repr(record) for record in other.history]
    figures = [{key: value for key, value in run.summary.items() if key != "notes"} for run in (one, other)]
    assert repr(figures[0]) == repr(figures[1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [programs.mlp, Normed], ids=["computed together", "one at a time"])
def test_under_any_policy(cut: Cut, policy: str, model: Callable[[], nn.Module]) -> None:
    job = program(model), f"replicas=3 aggregation={policy}"
    options = OPTIONS | POLICIES[policy] | {"seconds": 0.25, "evaluate_every": 0.05}
    whole = train(*job, engine="virtual", **options)
    for arrivals in (5, 4):
        assert cut(*job, arrivals=arrivals, **options).summary["signal"] == "SIGTERM"
    assert_equal(whole, cut(*job, arrivals=0, **options))


CLUSTER = """
hosts = 3
[links]
inside_bytes_per_s = 1e6
between_bytes_per_s = 3e5
latency_s = 1e-4
[[absences]]
host = 2
from_s = 0.04
until_s = 0.2
[failures]
mean_time_between_s = 0.2
mean_time_to_repair_s = 0.05
"""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compute", ["normal:mean=0.01,std=0.005", "0.01"], ids=["random", "all events at one time"])
def test_over_a_network_whose_hosts_come_and_go(cut: Cut, policy: str, compute: str, tmp_path: Path) -> None:
    """Queues of links, hosts that are away and attempts in every phase are as they were."""
    path = tmp_path.with_suffix(".toml")
    path.write_text(CLUSTER)
    job = program(), f"replicas=4 servers=2 aggregation={policy}"
    times = {"times": f"compute={compute} apply=0.001 network={path}", "delay": None}
    options = OPTIONS | POLICIES[policy] | times | {"seconds": 0.8, "evaluate_every": 0.1}
    whole = train(*job, engine="virtual", **options)
    for arrivals in (5, 7, 8):
        assert cut(*job, arrivals=arrivals, **options).summary["signal"] == "SIGTERM"
    resumed = cut(*job, arrivals=0, **options)
    assert_equal(whole, resumed)
    assert whole.left == resumed.left
    assert len(whole.left) > 1


def test_time_is_up_while_a_host_goes(cut: Cut, tmp_path: Path) -> None:
    """The update that the first of its replicas leaves complete takes longer than there is time."""
    path = tmp_path.with_suffix(".toml")
    links = "[links]\ninside_bytes_per_s = 1e6\nbetween_bytes_per_s = 1e2\nlatency_s = 1e-4\n"
    path.write_text(f"hosts = 2\n{links}[[absences]]\nhost = 1\nfrom_s = 50.0\nuntil_s = 55.0")
    job = program(), "replicas=5 servers=1 aggregation=synchronous:backups=1"
    options = OPTIONS | {"times": f"compute=0.01 apply=2 network={path}", "delay": None, "evaluate_every": 10}
    whole = train(*job, engine="virtual", seconds=100, **options)
    cut(*job, arrivals=0, seconds=51, **options)
    resumed = cut(*job, arrivals=0, seconds=100, **options)
    oracle.assert_same(whole.model, resumed.state, 0)
    assert [each.replica for each in whole.left] == [1, 3]
    assert whole.left == resumed.left


def test_a_network_of_other_hosts_begins_with_the_same_parameters(cut: Cut, tmp_path: Path) -> None:
    path = tmp_path.with_suffix(".toml")
    path.write_text(CLUSTER)
    job, options = (program(), "replicas=3 servers=1 aggregation=asynchronous"), OPTIONS | {"seconds": 0.3}
    cut(*job, arrivals=20, **options | {"times": f"network={path}"})
    path.write_text(CLUSTER.replace("hosts = 3", "hosts = 4"))
    resumed = cut(*job, arrivals=0, **options | {"times": f"network={path}"})
    assert resumed.summary["updates"] > 20
    assert resumed.summary["gradients"] == resumed.summary["applied"] + resumed.summary["discarded"]


def test_a_budget_in_steps(cut: Cut) -> None:
    job, options = (program(), "replicas=3 aggregation=asynchronous accumulate=2"), OPTIONS | {"steps": 12}
    whole = train(*job, engine="virtual", **options)
    cut(*job, arrivals=16, **options)
    assert_equal(whole, cut(*job, arrivals=0, **options))


@pytest.mark.parametrize("seconds", [0.1, 0.153])
def test_a_longer_budget(cut: Cut, seconds: float) -> None:
    """Time was up between two events, or while the server was updating A."""
    job, options = (program(), "replicas=3 aggregation=asynchronous"), OPTIONS | {"evaluate_every": 0.05}
    whole = train(*job, engine="virtual", seconds=0.3, **options)
    cut(*job, arrivals=0, seconds=seconds, **options)
    resumed = cut(*job, arrivals=0, seconds=0.3, **options)
    oracle.assert_same(whole.model, resumed.state, 0)
    assert resumed.summary["updates"] == whole.summary["updates"]


@pytest.mark.parametrize("strategy", ["replicas=2 aggregation=asynchronous", "replicas=3 aggregation=synchronous"])
def test_other_replicas_and_policies_begin_with_the_same_parameters(cut: Cut, strategy: str, tmp_path: Path) -> None:
    """Those of the epoch's samples that were not used are."""
    options = OPTIONS | {"epochs": 1, "evaluate_every": 1}
    before = cut(program(), "replicas=3 aggregation=asynchronous", arrivals=10, **options)
    checkpoint, _ = newest(tmp_path)
    assert checkpoint is not None
    assert all(torch.equal(value, checkpoint.read(name)) for name, value in before.state.items())
    after = cut(program(), strategy, arrivals=0, **options)
    last, _ = newest(tmp_path)
    assert last is not None
    assert last.manifest.head["run"]["coordinator"]["tally"]["samples"] == SAMPLES
    assert after.summary["notes"]["resumed"].startswith("went on from update 10 of ")


def test_a_users_loop_is_called_anew(cut: Cut) -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)

    job, options = (program(), "replicas=1"), OPTIONS | {"steps": 12, "loop": loop}
    whole = train(*job, engine="virtual", **options)
    cut(*job, arrivals=5, **options)
    resumed = cut(*job, arrivals=0, **options)
    oracle.assert_same(whole.model, resumed.state, 0)
