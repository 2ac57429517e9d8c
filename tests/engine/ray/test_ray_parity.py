"""Actors compute what one process computes, and every policy runs on them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from paceline import Run, Strategy, launch, train
from paceline.aggregation import Aggregation
from paceline.comm import recycling
from paceline.core.registry import family_of
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine import programs

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

STEPS = 9
"""Two epochs, nearly, of 50 samples for three replicas of 4 samples each: an uneven last batch."""

ROUNDING = 1e-12
"""Both sides add the same products in another order: some hundred rounding errors of 2e-16 each, over 9 steps."""

NORMALISED = 1e-9
"""Optimizers that divide a gradient by its own size make its relative error theirs, also where it is nearly zero."""

MOMENTUM = functools.partial(SGD, lr=0.1, momentum=0.9)

FEATURES: dict[str, tuple[dict[str, Any], float]] = {
    "momentum": ({"optimizer": MOMENTUM}, ROUNDING),
    "adam": ({"optimizer": functools.partial(Adam, lr=0.01)}, NORMALISED),
    "clipped and scheduled": (
        {
            "optimizer": functools.partial(AdamW, lr=0.01),
            "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5),
            "clip_norm": 0.05,
        },
        NORMALISED,
    ),
    "groups": ({"optimizer": programs.half_decayed}, NORMALISED),
    "tied": ({"model": programs.Tied}, ROUNDING),
    "dict": ({"model": programs.Two, "train": programs.with_dict()}, ROUNDING),
}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", FEATURES)
def test_actors_in_lockstep_are_one_process(on_ray: OnRay, name: str, replicas: int) -> None:
    fields, bound = FEATURES[name]
    program = programs.program(**fields)
    trained = on_ray(program, Strategy(replicas=replicas), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, replicas, STEPS), bound)
    assert trained.summary["updates"] == trained.summary["steps"] == STEPS


@pytest.mark.parametrize("loop", ["by_stream", "by_calls"])
def test_a_model_too_large_for_a_message(engine: RayEngine, loop: str) -> None:
    """Of calls, arrays from 100 kB on are in the object store, where they can't be written."""
    program = programs.program(model=large, optimizer=functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01))
    settings: dict[str, Any] = {"steps": 4, "progress": False, "evaluate_every": 10**6}
    trained = launch(globals()[loop], program, "replicas=3", engine=engine, **settings)
    assert trained.summary["parameter_bytes"][0] > 200_000
    oracle.assert_same(trained.model, oracle.one_process(program, 3, 4), ROUNDING)


def by_stream(worker: Any) -> None:
    for batch in worker.batches():
        worker.step(batch)
        assert worker._client._link._stream is not None


def by_calls(worker: Any) -> None:
    worker._client._link._tries = 0
    for batch in worker.batches():
        worker.step(batch)
        assert worker._client._link._stream is None


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 3)).double()


def test_memory_of_vectors_that_are_gone_is_used_again(on_ray: OnRay) -> None:
    """Snapshots wait for the evaluator meanwhile, Δs for others, and the standby's messages to be sent."""
    program, settings = programs.program(optimizer=MOMENTUM), {"steps": STEPS, "evaluate_every": 1}
    strategy = "replicas=3 standby=1"
    whole = on_ray(program, strategy, **settings)
    try:
        again = functools.partial(recycling_from, 8)
        run = on_ray(programs.program(optimizer=MOMENTUM, model=again), strategy, **settings)
    finally:  # actors are kept for other tests
        usual = functools.partial(recycling_from, recycling.LEAST_BYTES)
        on_ray(programs.program(model=usual), strategy, steps=1)
    assert [record.train_loss for record in run.history] == [record.train_loss for record in whole.history]
    oracle.assert_same(run.model, whole.state, 0.0)


def recycling_from(least_bytes: int) -> nn.Module:
    """Build the model of :func:`tests.engine.programs.program`; vectors from this size on are recycled from now on."""
    recycling.LEAST_BYTES = least_bytes
    return programs.mlp()


def test_accumulated_batches_are_one_larger_batch(on_ray: OnRay) -> None:
    program = programs.program(optimizer=MOMENTUM, clip_norm=0.5)
    trained = on_ray(program, Strategy(replicas=2, accumulate=3), steps=STEPS)
    oracle.assert_same(trained.model, oracle.one_process(program, 2, STEPS, 3), ROUNDING)


@pytest.mark.parametrize(("model", "replicas"), [("batchnorm", 1), ("batchnorm", 3), ("dropout", 2)])
def test_masks_and_running_means(on_ray: OnRay, model: str, replicas: int) -> None:
    # 48 samples: 3 replicas of 4 leave no batch of one sample, for which BatchNorm has no variance.
    program = programs.program(model=getattr(programs, model), train=programs.data(samples=48), optimizer=MOMENTUM)
    trained = on_ray(program, Strategy(replicas=replicas), steps=STEPS)
    oracle.assert_same(trained.model, oracle.rounds(program, replicas, STEPS), ROUNDING)


POLICIES = [
    "synchronous",
    "synchronous:backups=1",
    "asynchronous:damping=staleness",
    "smooth-switch:every=5",
    "smooth-switch:every=4,hold=false",
    "stale-synchronous:bound=1",
    "buffered:k=2,hold=false",
    "buffered:k=2,cancel=true",
    "smooth-switch:threshold=loss-driven",
    "local-steps:period=3",
    "local-steps:period=2,over=asynchronous",
    "elastic-averaging:period=2,elasticity=0.2",
    "decoupled:period=2,quorum=2,grace=0.5",
    "robust:k=1",
    "delay-compensated",
    "deadline:seconds=0.01",
]


def test_no_policy_is_left_out() -> None:
    kind = family_of(Aggregation)
    assert kind is not None
    # Of portions a replica computes any number: test_ray_portions.py.
    assert {text.partition(":")[0] for text in POLICIES} == kind.entries.keys() - {"hogwild", "sandblaster"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_counts_each_delta_once(on_ray: OnRay, policy: str) -> None:
    run = on_ray(programs.program(), f"replicas=3 aggregation={policy}", steps=STEPS)
    each = 1 if "period" not in policy else int(policy.partition("period=")[2][0])
    attempts = run.summary["gradients"] + run.summary["cancelled"]
    assert attempts == 3 * -(-STEPS // each)
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"]
    assert sum(run.summary["staleness"].values()) == run.summary["applied"] > 0
    assert run.summary["steps"] == STEPS


OF_ONE = [policy for policy in POLICIES if not any(word in policy for word in ("backups", "k=2", "quorum"))]
"""Those that one replica can have."""


@pytest.mark.parametrize("policy", OF_ONE)
def test_one_replica_does_what_virtual_time_says(on_ray: OnRay, policy: str) -> None:
    """Alone, its Δs arrive in one order only."""
    program, strategy = programs.program(optimizer=MOMENTUM), f"replicas=1 aggregation={policy}"
    virtual = train(program, strategy, engine="virtual", steps=STEPS, progress=False)
    real = on_ray(program, strategy, steps=STEPS)
    oracle.assert_same(real.model, virtual.state, ROUNDING)
    for count in ("updates", "gradients", "applied", "discarded", "staleness"):
        assert real.summary[count] == virtual.summary[count], count
