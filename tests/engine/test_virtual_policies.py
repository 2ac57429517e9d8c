"""What policies do to parameters: the equalities of the design, and each free-running policy against its own script."""

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from paceline import Program, Run, Strategy, train
from paceline.clock.times import Times
from tests import oracle
from tests.engine import programs

STEPS = 12
REPLICAS = 4
ROUNDING = 1e-12
"""Sums in another order: some hundred rounding errors of 2e-16 each, over a few dozen updates."""
NORMALISED = 1e-9
"""Adam divides a gradient by its own size, which makes its relative error Adam's, also where it is nearly zero."""

TIMES = "compute=exponential:mean=1"
DELAY = "fraction=0.5 exponential:mean=3"

OPTIMIZERS = {
    "sgd": functools.partial(SGD, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": functools.partial(Adam, lr=0.01),
}


def run(program: Program, aggregation: str, *, replicas: int = REPLICAS, steps: int = STEPS, **settings: Any) -> Run:
    given: dict[str, Any] = {"times": TIMES, "delay": DELAY} | settings
    strategy = Strategy(replicas=replicas, aggregation=aggregation)
    return train(program, strategy, engine="virtual", steps=steps, progress=False, **given)


def program(optimizer: str = "sgd", **fields: Any) -> Program:
    return programs.program(optimizer=OPTIMIZERS[optimizer], **fields)


PAIRS = {
    "threshold 1 is asynchronous": ("smooth-switch:every=1000000", "asynchronous"),
    "k=1 is asynchronous": ("buffered:k=1", "asynchronous"),
    "k=1 without hold is asynchronous": ("buffered:k=1,hold=false", "asynchronous"),
    "no bound is asynchronous": ("stale-synchronous:bound=1000,combine=sum", "asynchronous"),
    "threshold P is synchronous": ("smooth-switch:threshold=(linear:slope=1,initial=100)", "synchronous"),
    "k=P is synchronous": ("buffered:k=4", "synchronous"),
    "k=P with cancel is synchronous": ("buffered:k=4,cancel=true", "synchronous"),
    "sum over P": ("buffered:k=4,combine=sum", "synchronous:combine=sum"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", PAIRS)
def test_two_names_of_one_thing(name: str, optimizer: str) -> None:
    """To the bit: both make the same decisions, so the same operations in the same order."""
    one, other = (run(program(optimizer), aggregation) for aggregation in PAIRS[name])
    oracle.assert_same(one.model, dict(other.model.named_parameters()), 0.0)
    assert one.summary["updates"] == other.summary["updates"] > 0
    assert one.history == other.history


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize(
    "aggregation", ["stale-synchronous:bound=0,combine={}", "local-steps:period=1,over=(synchronous:combine={})"]
)
def test_no_slack_is_synchronous_under_plain_sgd(aggregation: str, combine: str) -> None:
    # 48 samples make full batches: stale-synchronous weighs by 1/P, not by samples.
    job = program(train=programs.data(samples=48))
    one, other = (run(job, text.format(combine)) for text in (aggregation, "synchronous:combine={}"))
    oracle.assert_same(one.model, dict(other.model.named_parameters()), ROUNDING)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "fields", [{}, {"scheduler": functools.partial(StepLR, step_size=5, gamma=0.5)}, {"clip_norm": 0.05}]
)
def test_asynchronous_is_a_parameter_server(optimizer: str, fields: dict[str, Any]) -> None:
    """Each gradient at exactly the version its replica had read."""
    job, bound = program(optimizer, **fields), NORMALISED if optimizer == "adam" else ROUNDING
    trained = run(job, "asynchronous", delay=None)
    values, staleness = oracle.parameter_server(job, Times.parse(TIMES), REPLICAS, STEPS)
    oracle.assert_same(trained.model, values, bound)
    counts = {str(s): staleness.count(s) for s in sorted(set(staleness))}
    assert trained.summary["staleness"] == counts
    assert max(staleness) > 3, "the script should show replicas far out of step"


@pytest.mark.parametrize("model", [programs.dropout, programs.batchnorm, programs.convolution, programs.Tied])
def test_models_that_are_computed_one_at_a_time(model: Any) -> None:
    job = program("momentum", model=model, train=programs.data(samples=48))
    values, _ = oracle.parameter_server(job, Times.parse(TIMES), REPLICAS, STEPS)
    oracle.assert_same(run(job, "asynchronous", delay=None).model, values, ROUNDING)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_damping_divides_the_learning_rate_by_staleness(optimizer: str) -> None:
    job = program(optimizer)
    trained = run(job, "asynchronous:damping=staleness", delay=None)
    values, _ = oracle.parameter_server(job, Times.parse(TIMES), REPLICAS, STEPS, lambda stale: 1 / max(1, stale))
    oracle.assert_same(trained.model, values, NORMALISED if optimizer == "adam" else ROUNDING)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("period", [1, 3])
def test_local_sgd(optimizer: str, period: int) -> None:
    """Optimizers live with the replicas, from the first step to the last."""
    job = program(optimizer, train=programs.data(samples=48), clip_norm=1.0)
    trained = run(job, f"local-steps:period={period}")
    values = oracle.local_steps(job, REPLICAS, STEPS // period, period)
    oracle.assert_same(trained.model, values, NORMALISED if optimizer == "adam" else ROUNDING)
    assert (trained.summary["steps"], trained.summary["updates"]) == (STEPS, STEPS // period)


def test_local_sgd_where_the_last_batches_are_uneven() -> None:
    """50 samples: rounds of two steps end with a batch of none or one; a change counts as its samples."""
    job = program("momentum")
    values = oracle.local_steps(job, REPLICAS, STEPS // 2, 2)
    oracle.assert_same(run(job, "local-steps:period=2").model, values, ROUNDING)


def test_a_schedule_of_local_steps_belongs_to_the_replica() -> None:
    job = program(scheduler=functools.partial(StepLR, step_size=5, gamma=0.5), train=programs.data(samples=48))
    values = oracle.local_steps(job, REPLICAS, STEPS // 3, 3)
    oracle.assert_same(run(job, "local-steps:period=3").model, values, ROUNDING)


@pytest.mark.parametrize("outer", ["nesterov", "nesterov:lr=0.5,momentum=0.5"])
def test_diloco(outer: str) -> None:
    job = program("adam", train=programs.data(samples=48))
    rule = oracle.nesterov(0.7, 0.9) if outer == "nesterov" else oracle.nesterov(0.5, 0.5)
    trained = run(job, f"local-steps:period=3,outer={outer if outer == 'nesterov' else f'({outer})'}")
    oracle.assert_same(trained.model, oracle.local_steps(job, REPLICAS, STEPS // 3, 3, rule), NORMALISED)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_downpour(optimizer: str) -> None:
    job = program(optimizer)
    trained = run(job, "local-steps:period=3,over=asynchronous", delay=None)
    values = oracle.downpour(job, Times.parse(TIMES), REPLICAS, STEPS // 3, 3)
    oracle.assert_same(trained.model, values, NORMALISED if optimizer == "adam" else ROUNDING)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("quorum", "grace"), [(1, 0.0), (2, 0.0), (2, 0.5), (3, 0.9), (4, 0.5)])
def test_rounds_of_those_that_are_in_time(optimizer: str, quorum: int, grace: float) -> None:
    job = program(optimizer, train=programs.data(samples=48))
    trained = run(job, f"decoupled:period=3,quorum={quorum},grace={grace}", delay=None, steps=30)
    values, merged = oracle.Rounds(job, Times.parse(TIMES), REPLICAS, 3, quorum, grace).run(10)
    oracle.assert_same(trained.model, values, NORMALISED if optimizer == "adam" else ROUNDING)
    assert trained.summary["updates"] == len(merged)
    assert trained.summary["applied"] == 10 * REPLICAS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_of_all_that_wait_are_diloco(optimizer: str) -> None:
    """To the bit, whatever the window, also where changes are of uneven numbers of samples."""
    one, other = (
        run(program(optimizer), aggregation)
        for aggregation in ("decoupled:period=3,quorum=all,hold=true", "local-steps:period=3,outer=nesterov")
    )
    oracle.assert_same(one.model, dict(other.model.named_parameters()), 0.0)
    assert one.history == other.history


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_elastic_averaging(optimizer: str, alpha: float) -> None:
    job = program(optimizer)
    trained = run(job, f"elastic-averaging:period=3,elasticity={alpha}", delay=None)
    values = oracle.elastic(job, Times.parse(TIMES), REPLICAS, STEPS // 3, 3, alpha)
    oracle.assert_same(trained.model, values, NORMALISED if optimizer == "adam" else ROUNDING)


@pytest.mark.parametrize("alpha", [0.25, 0.1])
def test_elastic_averaging_in_rounds(alpha: float) -> None:
    trained = run(program(), f"elastic-averaging:period=3,elasticity={alpha},synchronous=true", delay=None)
    values = oracle.elastic_rounds(program(), REPLICAS, STEPS // 3, 3, alpha)
    oracle.assert_same(trained.model, values, ROUNDING)
    assert trained.summary["updates"] == STEPS // 3


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_further_ahead_than_the_bound(bound: int) -> None:
    """Between a read and its Δ, another replica goes from at most s behind to at most s ahead: 2s + 1 Δs of each."""
    job = program(train=programs.data(samples=48))
    leashed, free = (
        run(job, aggregation, delay="fraction=0.5 exponential:mean=20", steps=40)
        for aggregation in (f"stale-synchronous:bound={bound}", "asynchronous")
    )
    assert leashed.summary["staleness_max"] <= (2 * bound + 1) * (REPLICAS - 1) < free.summary["staleness_max"]
    assert leashed.summary["applied"] == free.summary["applied"] == 40 * REPLICAS


def test_every_strategy_starts_from_the_same_bits() -> None:
    texts = ["synchronous", "asynchronous", "local-steps:period=2", "elastic-averaging"]
    runs = [run(program(), text, replicas=p) for text in texts for p in (1, 3)]
    assert len({r.summary["start_digest"] for r in runs}) == 1
    assert {r.history[0].updates for r in runs} == {0}
    assert len({r.history[0].train_loss for r in runs}) == 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert run(program(), "synchronous").summary["start_digest"] == runs[0].summary["start_digest"]
