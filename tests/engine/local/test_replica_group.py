"""Replicas of several workers go on by themselves, under any policy: what one worker would compute, they compute."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from paceline import Run, Strategy, train
from paceline.aggregation import SmoothSwitch
from paceline.core.registry import family_of, register
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.fault_injection import EventScript
from paceline.schedule import Action, Schedule
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 5

ROUNDING = 1e-12
"""Micro-batches and shards add the same products in another order: some rounding errors of 2e-16 each a step."""

SCHEDULES = family_of(Schedule)
assert SCHEDULES is not None

MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)

TEAMS = [
    "stages=2 micro_batches=2",
    "shards=2",
    "stages=2 shards=2 micro_batches=2",
    "stages=[2,1] micro_batches=2",
    "stages=[2] micro_batches=2",
    "micro_batches=2",
]


@pytest.mark.parametrize("team", TEAMS)
def test_one_replica_on_its_own_is_one_process(local: Local, team: str) -> None:
    program = programs.program(optimizer=MOMENTUM, clip_norm=0.05)
    trained = local(program, Strategy.parse(f"aggregation=asynchronous {team}"), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 1, STEPS), ROUNDING)
    assert trained.summary["updates"] == trained.summary["gradients"] == STEPS
    assert trained.summary["staleness"] == {"0": STEPS}


def test_a_schedule_of_a_script_of_ones_own(local: Local) -> None:
    """No worker can import the class, as none can import one of a script or of a notebook's cell."""

    @register("first-come")
    @dataclass(frozen=True)
    class FirstCome(Schedule):
        def actions(self, worker: int, workers: int, micro_batches: int) -> Iterator[Action]:
            for i in range(micro_batches):
                yield Action(worker, "forward", i)
            for i in range(micro_batches):
                yield Action(worker, "backward", i)

    program = programs.program(optimizer=MOMENTUM)
    try:
        trained = local(program, "stages=2 micro_batches=2 schedule=first-come", steps=STEPS)
    finally:
        del SCHEDULES.entries["first-come"]
    oracle.assert_same(trained.model, oracle.one_process(program, 1, STEPS), ROUNDING)


@pytest.mark.parametrize("uneven", ["stages=2 shards=[2,1] micro_batches=2", "stages=2 shards=[1,2] micro_batches=1"])
def test_stages_of_different_numbers_of_shards(local: Local, uneven: str) -> None:
    program = programs.program(optimizer=MOMENTUM)
    trained = local(program, Strategy.parse(f"aggregation=asynchronous {uneven}"), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 1, STEPS), ROUNDING)


def test_where_the_policy_waits_for_all_it_is_synchronous_training(local: Local) -> None:
    """50 samples, two replicas of 4: after 6 rounds an uneven one, in which a replica has fewer samples."""
    program = programs.program(optimizer=MOMENTUM)
    strategy = Strategy.parse("replicas=2 stages=2 micro_batches=2 aggregation=buffered:k=2,combine=mean")
    trained = local(program, strategy, steps=8)
    oracle.assert_same(trained.model, oracle.one_process(program, 2, 8), ROUNDING)


def test_smooth_switch_that_waits_for_all_is_synchronous_training_of_pipelines(local: Local) -> None:
    program = programs.program(optimizer=MOMENTUM)
    switch = SmoothSwitch(threshold=both, combine="mean")
    switched = local(program, Strategy(replicas=2, stages=2, micro_batches=2, aggregation=switch), steps=STEPS)
    together = local(program, Strategy(replicas=2, stages=2, micro_batches=2), steps=STEPS)
    oracle.assert_same(switched.model, together.state, ROUNDING)
    oracle.assert_same(switched.model, oracle.one_process(program, 2, STEPS), ROUNDING)
    assert switched.summary["updates"] == STEPS


def both(u: int) -> float:
    return 2


# ------------------------------------------------------------------------------------------ the same order of arrivals

POLICIES = [
    "synchronous:backups=1",
    "asynchronous",
    "asynchronous:damping=staleness",
    "smooth-switch:every=3",
    "smooth-switch:every=4,hold=false",
    "stale-synchronous:bound=1",
    "buffered:k=2,hold=false",
    "buffered:k=1,cancel=true",
    "local-steps:period=3",
    "local-steps:period=3,outer=nesterov",
    "local-steps:period=2,over=asynchronous",
    "elastic-averaging:period=2,elasticity=0.2",
]

TIMES = "compute=exponential:mean=1 apply=0.1 gradient=0.05"
"""In virtual time: an order of arrivals that is far from turns, with Δs that wait for the server."""


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(replica, step) of each Δ as it reaches a coordinator."""
    seen: list[tuple[int, int]] = []
    plain = Coordinator.arrived

    def arrived(self: Coordinator, arrival: Any) -> None:
        seen.append((arrival.replica, arrival.clock))
        plain(self, arrival)

    monkeypatch.setattr(Coordinator, "arrived", arrived)
    return seen


def assert_replayed(
    local: Local, arrivals: list[tuple[int, int]], team: str, policy: str, bound: float = ROUNDING, **fields: Any
) -> None:
    """Teams that take Δs in the order of virtual time do what single workers do there."""
    program = programs.program(train=programs.data(samples=48), **fields)
    single = Strategy.parse(f"replicas=2 aggregation={policy}")
    virtual = train(program, single, engine="virtual", steps=6, times=TIMES, progress=False)
    order = tuple(arrivals)
    arrivals.clear()
    teams = Strategy.parse(f"replicas=2 aggregation={policy} {team}")
    real = local(program, teams, steps=6, script=EventScript().order(*order))
    assert tuple(arrivals) == order
    named = (*virtual.model.named_parameters(), *virtual.model.named_buffers())  # a weight of two names has one here
    oracle.assert_same(real.model, {name: tensor.detach() for name, tensor in named}, bound)
    for count in ("updates", "gradients", "applied", "discarded", "cancelled", "staleness"):
        assert real.summary[count] == virtual.summary[count], count


@pytest.mark.parametrize("policy", POLICIES)
def test_pipelines_do_what_virtual_time_says(local: Local, arrivals: list[tuple[int, int]], policy: str) -> None:
    fields = {"optimizer": MOMENTUM, "clip_norm": 1.0}
    assert_replayed(local, arrivals, "stages=2 micro_batches=2", policy, **fields)


SHARDED = ["asynchronous", "smooth-switch:every=3", "local-steps:period=2,over=asynchronous"]


@pytest.mark.parametrize("policy", SHARDED)
def test_and_so_do_shards(local: Local, arrivals: list[tuple[int, int]], policy: str) -> None:
    assert_replayed(local, arrivals, "shards=2", policy, optimizer=MOMENTUM, clip_norm=0.05)


def test_own_steps_of_shards_clip_by_the_norm_of_the_whole(local: Local, arrivals: list[tuple[int, int]]) -> None:
    schedule = functools.partial(StepLR, step_size=2, gamma=0.5)
    team, policy = "stages=2 shards=2 micro_batches=2", "local-steps:period=2"
    assert_replayed(local, arrivals, team, policy, optimizer=MOMENTUM, clip_norm=0.05, scheduler=schedule)


def test_running_means(local: Local, arrivals: list[tuple[int, int]]) -> None:
    """Of one micro-batch: means and variances are then of the whole batch."""
    team = "stages=2 micro_batches=1"
    assert_replayed(local, arrivals, team, "asynchronous", model=programs.batchnorm, optimizer=MOMENTUM)


def test_masks_of_shards(local: Local, arrivals: list[tuple[int, int]]) -> None:
    assert_replayed(local, arrivals, "shards=2", "asynchronous", model=programs.dropout, optimizer=MOMENTUM)


def test_masks_of_pipelines_are_those_of_their_replica(local: Local) -> None:
    """Two replicas that wait for each other, against two that make one update together."""
    program = programs.program(model=programs.dropout, optimizer=MOMENTUM)
    pipelines = "replicas=2 stages=2 micro_batches=2 cuts=2"  # masks are those of a part: all must be cut alike
    waiting = local(program, f"{pipelines} aggregation=buffered:k=2", steps=STEPS)
    oracle.assert_same(waiting.model, local(program, pipelines, steps=STEPS).state, ROUNDING)


def test_a_weight_that_two_stages_share(local: Local, arrivals: list[tuple[int, int]]) -> None:
    team = "stages=2 micro_batches=2"
    assert_replayed(local, arrivals, team, "asynchronous", model=programs.Tied, optimizer=MOMENTUM)


def test_a_replica_that_is_called_off_within_a_gradient(local: Local, arrivals: list[tuple[int, int]]) -> None:
    """It stops between two of its batches, and makes the next attempt whole."""
    team, policy = "stages=2 micro_batches=2", "buffered:k=1,cancel=true accumulate=3"
    assert_replayed(local, arrivals, team, policy, optimizer=MOMENTUM)


def test_several_batches_make_one_gradient(local: Local) -> None:
    team = "stages=2 micro_batches=2 accumulate=2"
    program = programs.program(optimizer=MOMENTUM)
    trained = local(program, Strategy.parse(f"aggregation=asynchronous {team}"), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 1, STEPS, 2), ROUNDING)


# --------------------------------------------------------------------------------------------- Δ is seen as a whole


class Rooted(nn.Module):
    """Finite forward; the gradient of one tensor alone is not: 0 · ∞, that of √|x| at 0."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.root, self.last = nn.Parameter(torch.zeros(3 if last else 6)), last
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        root = self.root.abs().sqrt()
        if self.last:
            return self.second(torch.tanh(self.first(x))) + root
        return self.second(torch.tanh(self.first(x + root)))


@pytest.mark.parametrize("last", [False, True])
def test_a_part_that_is_not_finite_spoils_all_of_its_delta(local: Local, last: bool) -> None:
    program = programs.program(model=functools.partial(Rooted, last))
    strategy = Strategy.parse("stages=2 micro_batches=2 aggregation=asynchronous")
    trained = local(program, strategy, steps=3, on_nonfinite="skip")
    assert trained.summary["nonfinite"] == trained.summary["discarded"] == 3
    assert trained.summary["updates"] == 0
    oracle.assert_same(trained.model, oracle.Plain(program).values(), 0.0)


def with_an_infinite_batch(worker: Any) -> None:
    """The plain loop, but the second batch has inputs that are no numbers."""
    for made, batch in enumerate(worker.batches(), 1):
        worker.step((batch.input * torch.inf, batch.target) if made == 2 else batch)


@pytest.mark.parametrize("team", ["stages=2 micro_batches=2", "shards=2"])
def test_own_steps_begin_anew_after_a_delta_that_is_not_finite(local: Local, team: str) -> None:
    """All workers do: what any of them had kept would spoil all that follows."""
    strategy = Strategy.parse(f"aggregation=local-steps:period=1,over=asynchronous {team}")
    program = programs.program(optimizer=MOMENTUM)
    trained = local(program, strategy, steps=4, on_nonfinite="skip", loop=with_an_infinite_batch)
    assert trained.summary["nonfinite"] == 1
    assert trained.summary["applied"] == 3
