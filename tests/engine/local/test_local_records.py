"""Budgets, history, summary and spans of real processes."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Run
from paceline.clock.times import Delay
from paceline.engine.local.fault_injection import EventScript
from paceline.trace.spans import SERVER, Span
from tests.engine import programs

Local = Callable[..., Run]

WITH_TEST = {"test": programs.data(samples=30)}


# -------------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous", "stale-synchronous:bound=1", "hogwild"])
def test_every_replica_makes_its_steps(local: Local, policy: str) -> None:
    run = local(programs.program(train=programs.data(samples=48)), f"replicas=3 aggregation={policy}", steps=7)
    assert run.summary["gradients"] == 21
    assert run.summary["steps"] == 7
    assert all(0 < u <= 1 for u in run.summary["utilisation"])


def test_cancelled_steps_are_steps(local: Local) -> None:
    run = local(programs.program(), "replicas=3 aggregation=buffered:k=1,cancel=true", steps=7)
    assert run.summary["gradients"] + run.summary["cancelled"] == 21


def test_steps_of_ones_own_are_steps_too(local: Local) -> None:
    """7 = 3 + 3 + 1."""
    run = local(
        programs.program(train=programs.data(samples=48)), "replicas=2 aggregation=local-steps:period=3", steps=7
    )
    assert (run.summary["steps"], run.summary["updates"], run.summary["gradients"]) == (7, 3, 6)


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous"])
def test_epochs_are_samples(local: Local, policy: str) -> None:
    """Free-running replicas overshoot by less than a batch each."""
    run = local(programs.program(), f"replicas=3 aggregation={policy}", epochs=2)
    samples = run.summary["samples_per_s"] * run.summary["seconds"]
    assert 100 <= round(samples) < (100.5 if policy == "synchronous" else 112)


def test_seconds_are_those_of_training(local: Local) -> None:
    run = local(programs.program(), "replicas=2 aggregation=asynchronous", seconds=0.5, evaluate_every=0.25)
    assert run.summary["seconds"] == run.history[-1].time_s == 0.5
    assert run.history[0].updates == 0
    assert 2 <= len(run.history) <= 3  # a busy machine may pass a point by
    assert run.summary["updates"] == run.history[-1].updates > 0


def test_a_condition_ends_the_run(local: Local) -> None:
    run = local(programs.program(), "replicas=2", until="updates>=5", evaluate_every=0.01)
    assert max(record.updates for record in run.history) >= 5
    assert run.summary["updates"] == run.history[-1].updates


# ------------------------------------------------------------------------------------------------------------- history


def test_a_score_at_the_start_and_twenty_points(local: Local) -> None:
    """In lockstep each of 40 steps is seen, so no point can be missed."""
    run = local(programs.program(**WITH_TEST), "replicas=2", steps=40)
    assert [record.updates for record in run.history] == list(range(0, 41, 2))
    assert all(a.time_s < b.time_s for a, b in pairwise(run.history))
    assert all(record.test_loss is not None and record.test_accuracy is not None for record in run.history)
    assert run.summary["test_loss"] == run.history[-1].test_loss


def test_epochs_have_them_too(local: Local) -> None:
    run = local(programs.program(train=programs.data(samples=160)), "replicas=2", epochs=1)
    assert [record.updates for record in run.history] == list(range(21))


def test_no_point_is_missed_where_several_report_at_once(local: Local) -> None:
    program = programs.program(train=programs.data(samples=48))
    run = local(program, "replicas=6 aggregation=asynchronous", steps=20, evaluate_every=1 / 6)
    assert [record.gradients for record in run.history] == list(range(121))


def test_more_points_than_any_queue_holds(local: Local) -> None:
    """The scorer is slower than training, and main waits for it at the end alone."""
    run = local(programs.program(**WITH_TEST), "replicas=1", steps=600, evaluate_every=1)
    assert [record.updates for record in run.history] == list(range(601))


def test_the_final_record_is_of_the_model_that_comes_back(local: Local) -> None:
    for policy in ("asynchronous", "hogwild"):
        program = programs.program(**WITH_TEST)
        run = local(program, f"replicas=3 aggregation={policy}", seconds=0.2)
        assert run.model is not None
        inputs, targets = WITH_TEST["test"]
        loss = nn.functional.cross_entropy(run.model.eval()(inputs), targets)
        assert run.history[-1].test_loss == pytest.approx(loss.item(), abs=1e-12)  # chunks may add up otherwise


# ------------------------------------------------------------------------------------------------------------- summary


def test_what_a_host_can_measure(local: Local) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    run = local(programs.program(optimizer=adam), "replicas=3", steps=5)
    parameters = 8 * sum(p.numel() for p in programs.mlp().parameters())
    summary = run.summary
    assert summary["parameter_bytes"] == [parameters] * 3
    assert summary["optimizer_bytes"] == [0] * 3  # it lies once, with the server of A
    assert summary["notes"]["server_optimizer_bytes"] == 2 * parameters
    assert summary["payload_bytes_per_step"] == summary["payload_formula_bytes_per_step"] == 2 * parameters * 3
    assert all(peak > 1_000_000 for peak in summary["peak_memory_bytes"])
    assert 0 < summary["step_time_s"] < summary["seconds"]
    assert len(summary["start_digest"]) == 64
    assert summary["notes"]["threads"] >= 1


def test_payload_of_fewer_pushes(local: Local) -> None:
    """2·|A| for each Δ: of three own steps, or of three micro-steps that make one step."""
    parameters = 8 * sum(p.numel() for p in programs.mlp().parameters())
    own = local(programs.program(), "replicas=2 aggregation=local-steps:period=3", steps=6).summary
    assert own["payload_bytes_per_step"] == pytest.approx(2 * parameters * 2 / 3)
    accumulated = local(programs.program(), "replicas=2 accumulate=3", steps=6).summary
    assert accumulated["payload_bytes_per_step"] == 2 * parameters * 2
    assert local(programs.program(), "replicas=2 aggregation=hogwild", steps=6).summary["payload_bytes_per_step"] == 0


def test_equal_starts_have_equal_digests(local: Local) -> None:
    digests = {
        local(programs.program(seed=seed), strategy, steps=1).summary["start_digest"]
        for seed in (1, 2)
        for strategy in ("replicas=1", "replicas=2 aggregation=asynchronous")
    }
    assert len(digests) == 2


# -------------------------------------------------------------------------------------------------------------- delays


def test_delays_slow_the_chosen_alone_and_are_cut_short(local: Local) -> None:
    """A thousand seconds each: only who is not slowed gets anywhere; the others are called off again and again."""
    program = programs.program()
    delay = Delay.parse("fraction=0.5 constant:value=1000")
    slowed = delay.slowed(replicas=4, seed=program.seed)
    policy = "buffered:k=2,cancel=true"
    until = {"until": "updates>=20", "evaluate_every": 0.02}
    run = local(program, f"replicas=4 aggregation={policy}", delay=delay, trace=True, **until)
    assert {span.replica for span in run.spans if span.action == "delay"} == slowed
    assert {span.replica for span in run.spans if span.action == "push"} == set(range(4)) - slowed
    assert run.summary["cancelled"] > 0


def test_the_end_cuts_delays_short_too(local: Local) -> None:
    delay = Delay.parse("fraction=0.5 constant:value=1000")
    run = local(programs.program(), "replicas=2 aggregation=asynchronous", seconds=0.3, delay=delay)
    assert run.left == []
    assert run.summary["gradients"] > 0


# --------------------------------------------------------------------------------------------------------------- spans


def lanes(run: Run) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in run.spans:
        found.setdefault(span.replica, []).append(span)
    return found


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous", "local-steps:period=2"])
def test_spans_tell_what_each_lane_did(local: Local, policy: str) -> None:
    delay = Delay.parse("fraction=1 constant:value=0.001")
    run = local(programs.program(), f"replicas=2 aggregation={policy}", steps=6, trace=True, delay=delay)
    found = lanes(run)
    assert set(found) == {SERVER, 0, 1}
    assert {span.action for span in found[SERVER]} == {"apply"}
    assert [span.step for span in found[SERVER]] == list(range(1, run.summary["updates"] + 1))
    for replica in (0, 1):
        assert {s.action for s in found[replica]} == {"pull", "forward", "backward", "push", "delay", "wait"}
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(found[replica]))
    end_ns = run.summary["seconds"] * 1e9
    assert all(0 <= span.start_ns < span.end_ns <= end_ns for span in found[0] if span.action != "wait")


def test_nothing_is_recorded_unasked(local: Local) -> None:
    assert local(programs.program(), "replicas=2", steps=3).spans == []


def test_a_wait_for_a_slow_one_is_seen(local: Local) -> None:
    """One replica is slowed by 50 ms: in lockstep the other one waits for most of that, and says so."""
    delay = Delay.parse("fraction=0.5 constant:value=0.05")
    program = programs.program()
    (slow,) = delay.slowed(replicas=2, seed=program.seed)
    run = local(program, "replicas=2", steps=4, trace=True, delay=delay)
    waits = [span for span in run.spans if span.action == "wait" and span.replica != slow]
    assert sum(span.end_ns - span.start_ns for span in waits) > 0.05e9
    assert run.summary["utilisation"][slow] > run.summary["utilisation"][1 - slow]


def test_spans_of_a_killed_worker_are_kept_as_far_as_it_wrote_them(local: Local) -> None:
    run = local(programs.program(), "replicas=2", steps=300, trace=True, script=EventScript().kill(replica=1, step=250))
    assert [d.replica for d in run.left] == [1]
    assert len(lanes(run)[1]) >= 512  # what its buffer holds, once


def test_progress_is_told(local: Local, capsys: pytest.CaptureFixture[Any]) -> None:
    local(programs.program(), "replicas=2", steps=3, progress=True)
    assert capsys.readouterr().err
