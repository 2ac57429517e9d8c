"""Real processes compute what one process computes: synchronous F as it is, every other in a replayed order."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from paceline import Program, Run, Strategy, train
from paceline.core.records import Record
from paceline.engine.coordinator import Coordinator
from paceline.engine.local.fault_injection import EventScript
from tests import oracle
from tests.engine import programs

Local = Callable[..., Run]

STEPS = 13
"""Two and a half epochs and more of 50 samples, three replicas of 4 samples each: uneven last batches."""

ROUNDING = 1e-12
"""Both sides add the same products in another order: some hundred rounding errors of 2e-16 each, over 13 steps."""

NORMALISED = 1e-9
"""Optimizers that divide a gradient by its own size make its relative error theirs, also where it is nearly zero."""

MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)

FEATURES: dict[str, tuple[dict[str, Any], float]] = {
    "sgd": ({}, ROUNDING),
    "momentum": ({"optimizer": MOMENTUM}, ROUNDING),
    "adam": ({"optimizer": functools.partial(Adam, lr=0.01)}, NORMALISED),
    "groups": ({"optimizer": programs.half_decayed}, NORMALISED),
    "scheduler": ({"optimizer": MOMENTUM, "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5)}, ROUNDING),
    "clipping": ({"optimizer": MOMENTUM, "clip_norm": 0.05}, ROUNDING),
    "all of them": (
        {
            "optimizer": functools.partial(AdamW, lr=0.01),
            "scheduler": functools.partial(CosineAnnealingLR, T_max=STEPS),
            "clip_norm": 0.05,
        },
        NORMALISED,
    ),
    "tuple": ({"model": programs.Two, "train": programs.with_tuple()}, ROUNDING),
    "dict": ({"model": programs.Two, "train": programs.with_dict()}, ROUNDING),
    "tied": ({"model": programs.Tied}, ROUNDING),
    "frozen": ({"model": programs.frozen}, ROUNDING),
}


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("name", FEATURES)
def test_processes_in_lockstep_are_one_process(local: Local, name: str, replicas: int) -> None:
    fields, bound = FEATURES[name]
    program = programs.program(**fields)
    trained = local(program, Strategy(replicas=replicas), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, replicas, STEPS), bound)
    assert trained.summary["updates"] == trained.summary["steps"] == STEPS


@pytest.mark.parametrize("replicas", [2, 3])
def test_accumulated_batches_are_one_larger_batch(local: Local, replicas: int) -> None:
    program = programs.program(optimizer=MOMENTUM, clip_norm=0.5)
    trained = local(program, Strategy(replicas=replicas, accumulate=3), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, replicas, STEPS, 3), ROUNDING)
    assert trained.summary["steps"] == trained.summary["updates"] == STEPS


@pytest.mark.parametrize(("model", "replicas"), [("batchnorm", 1), ("batchnorm", 3), ("dropout", 1), ("dropout", 2)])
def test_masks_and_running_means(local: Local, model: str, replicas: int) -> None:
    # 48 samples: 3 replicas of 4 leave no batch of one sample, for which BatchNorm has no variance.
    program = programs.program(model=getattr(programs, model), train=programs.data(samples=48), optimizer=MOMENTUM)
    trained = local(program, Strategy(replicas=replicas), steps=STEPS)
    oracle.assert_same(trained.model, oracle.rounds(program, replicas, STEPS), ROUNDING)


@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_are_passes_over_the_data(local: Local, epochs: int) -> None:
    program = programs.program()
    trained = local(program, "replicas=2", epochs=epochs)
    steps = 7 * epochs  # 50 = 6 · 8 + 2
    oracle.assert_same(trained.model, oracle.one_process(program, 2, steps), ROUNDING)


# ------------------------------------------------------------------------------------------ the same order of arrivals


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


POLICIES = [
    "synchronous:backups=1",
    "asynchronous",
    "asynchronous:damping=staleness",
    "smooth-switch:every=5",
    "smooth-switch:every=3,combine=sum",
    "smooth-switch:every=4,hold=false",
    "stale-synchronous:bound=0",
    "stale-synchronous:bound=1",
    "stale-synchronous:bound=2,combine=sum",
    "buffered:k=2",
    "buffered:k=2,hold=false",
    "buffered:k=2,cancel=true",
    "buffered:k=2,hold=false,cancel=true",
    "local-steps:period=3",
    "local-steps:period=3,outer=nesterov",
    "local-steps:period=2,over=asynchronous",
    "local-steps:period=2,over=(buffered:k=2)",
    "elastic-averaging:period=2,elasticity=0.2",
    "decoupled:period=2,quorum=all",
    "decoupled:period=3,quorum=all,hold=true",
    "robust",
    "robust:by=(krum:faulty=0,best=2)",
    "robust:trimmed-mean",
    "delay-compensated:strength=3",
]

TIMES = "compute=exponential:mean=1 apply=0.1 gradient=0.05"
"""In virtual time: an order of arrivals that is far from turns, with Δs that wait for the server."""


def replayed(local: Local, arrivals: list[tuple[int, int]], program: Program, strategy: Strategy) -> tuple[Run, Run]:
    """The run in virtual time, and the one in processes that takes Δs in the same order."""
    virtual = train(program, strategy, engine="virtual", steps=6, times=TIMES, progress=False)
    order = tuple(arrivals)
    arrivals.clear()
    real = local(program, strategy, steps=6, script=EventScript().order(*order))
    assert tuple(arrivals) == order
    return virtual, real


@pytest.mark.parametrize("policy", POLICIES)
def test_processes_do_what_virtual_time_says(local: Local, arrivals: list[tuple[int, int]], policy: str) -> None:
    program = programs.program(optimizer=MOMENTUM, clip_norm=1.0)
    virtual, real = replayed(local, arrivals, program, Strategy.parse(f"replicas=3 aggregation={policy}"))
    oracle.assert_same(real.model, virtual.state, ROUNDING)
    for count in ("updates", "gradients", "applied", "discarded", "cancelled", "staleness"):
        assert real.summary[count] == virtual.summary[count], count
    if not real.summary["cancelled"]:  # a real replica takes a moment to stop, in which the run may be scored
        assert [points(r) for r in real.history] == [points(r) for r in virtual.history]


def points(record: Record) -> tuple[Any, ...]:
    return record.updates, record.gradients, record.threshold, record.staleness_mean


FAMILIES = {
    "accumulated": {"strategy": "accumulate=2 aggregation=asynchronous"},
    "accumulated and cancelled": {"strategy": "accumulate=3 aggregation=buffered:k=2,cancel=true"},
    "masks": {"strategy": "aggregation=asynchronous", "model": programs.dropout},
    "masks of cancelled steps": {
        "strategy": "accumulate=2 aggregation=buffered:k=1,cancel=true",
        "model": programs.dropout,
    },
    "running means": {"strategy": "aggregation=smooth-switch:every=5", "model": programs.batchnorm},
    "running means of one's own": {"strategy": "aggregation=local-steps:period=2", "model": programs.batchnorm},
    "adam": {"strategy": "aggregation=asynchronous", "optimizer": functools.partial(Adam, lr=0.01)},
    "a schedule of one's own": {
        "strategy": "aggregation=local-steps:period=2",
        "scheduler": functools.partial(StepLR, step_size=3, gamma=0.5),
    },
    "disjoint": {"strategy": "partition=disjoint aggregation=stale-synchronous:bound=1"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_and_for_what_a_program_may_have(local: Local, arrivals: list[tuple[int, int]], name: str) -> None:
    # 48 samples: BatchNorm has no variance of one.
    fields = dict(FAMILIES[name])
    strategy = Strategy.parse(f"replicas=3 {fields.pop('strategy')}")
    virtual, real = replayed(local, arrivals, programs.program(train=programs.data(samples=48), **fields), strategy)
    oracle.assert_same(real.model, virtual.state, NORMALISED if name == "adam" else ROUNDING)
    assert real.summary["staleness"] == virtual.summary["staleness"]


def test_hogwild_alone_is_one_process(local: Local) -> None:
    program = programs.program(optimizer=MOMENTUM)
    trained = local(program, "replicas=1 aggregation=hogwild", steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 1, STEPS), ROUNDING)
