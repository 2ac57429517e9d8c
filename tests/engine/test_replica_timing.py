"""Replicas of several workers in virtual time: they compute as one process does, and take what their schedule takes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from paceline import InputError, Program, Run, train
from paceline.engine.virtual.engine import VirtualEngine
from paceline.metrics.pipeline_step import pipeline_step
from tests import zoo
from tests.engine.tensor_cases import Case, branches
from tests.replica.pipeline.cut_models import CUTS, NEEDS, Branches

TIMES = "compute=0.012"
"""Of one process, for a Δ."""


def run(strategy: str, job: Any = zoo.tied, **settings: Any) -> Run:
    usual: dict[str, Any] = {"steps": 6, "times": TIMES, "progress": False}
    return train(Case(job).program, strategy, engine=VirtualEngine(), **usual | settings)


@pytest.mark.parametrize(
    ("divided", "plain"),
    [
        ("stages=2 micro_batches=4", "replicas=1"),
        ("stages=3 shards=2 micro_batches=2", "replicas=1"),
        ("replicas=2 shards=2", "replicas=2"),
        ("replicas=3 stages=2 aggregation=asynchronous", "replicas=3 aggregation=asynchronous"),
        ("replicas=3 stages=2 aggregation=smooth-switch:every=4", "replicas=3 aggregation=smooth-switch:every=4"),
    ],
)
def test_it_computes_what_one_process_does(divided: str, plain: str) -> None:
    found, expected = run(divided), run(plain)
    assert all(torch.equal(found.state[name], value) for name, value in expected.state.items())
    assert [r.updates for r in found.history] == [r.updates for r in expected.history]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_takes_what_its_schedule_takes(schedule: str, stages: int, micro_batches: int) -> None:
    """(m + p - 1)/(m·p) of one process, where all stages take the same."""
    found = run(f"stages={stages} micro_batches={micro_batches} schedule={schedule}")
    share = (micro_batches + stages - 1) / (micro_batches * stages)
    assert found.history[-1].time_s == pytest.approx(6 * 0.012 * share, rel=1e-6)  # times are whole nanoseconds
    assert found.summary["notes"]["time_of_one_process"] == pytest.approx(share, rel=1e-6)


def test_shards_of_a_stage_take_their_part_of_it() -> None:
    found = run("stages=2 micro_batches=2 shards=[3,3]")
    assert found.history[-1].time_s == pytest.approx(6 * 0.012 * 3 / 4 / 3, rel=1e-6)


def test_who_take_turns_at_a_stage() -> None:
    """The page on pipelines draws it: 18 units, of the 36 that one process takes."""
    found = run("stages=[2,1] micro_batches=4", trace=True)
    assert found.history[-1].time_s == pytest.approx(6 * 0.012 * 18 / 36, rel=1e-6)
    assert {(s.stage, s.shard) for s in found.spans if s.action == "forward"} == {(0, 0), (0, 1), (1, 0)}


def test_branches_take_as_long_as_the_longest_of_them() -> None:
    """Seven stages of which four are on the longest way: (m + d - 1)/(m·p), and the ideal beside it says so too."""
    images = torch.randn(32, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = Program(
        lambda: Branches().double(), cross_entropy, partial(SGD, lr=0.1), (images, torch.arange(32) % 5), batch_size=8
    )
    strategy = f"stages=7 micro_batches=4 cuts={','.join(CUTS)}"
    found, alone = (
        train(program, each, engine=VirtualEngine(), steps=3, times=TIMES, trace=True, progress=False)
        for each in (strategy, "replicas=1")
    )
    assert found.history[-1].time_s == pytest.approx(3 * 0.012 * 7 / 28, rel=1e-6)
    assert found.summary["notes"]["part_dependencies"] == NEEDS
    assert all(torch.equal(found.state[name], value) for name, value in alone.state.items())
    step = pipeline_step(found.spans, found.strategy, found.summary)
    assert step is not None
    assert step.pace.ratio == pytest.approx(1, rel=1e-5)  # each time of 143 µs is rounded to whole nanoseconds
    chain = pipeline_step(found.spans, found.strategy)
    assert chain is not None
    assert chain.pace.ideal_s == pytest.approx(step.pace.ideal_s * 10 / 7, rel=1e-5)


def test_shards_alone_take_what_the_busiest_does() -> None:
    share = run("shards=2").history[-1].time_s / (6 * 0.012)
    assert 0.5 <= share < 0.6


def test_measured_stages_add_up_to_one_process() -> None:
    """A pipeline of one micro-batch does one stage after the other."""
    found = run("stages=3 micro_batches=1", times="compute=measured")
    assert found.summary["notes"]["time_of_one_process"] == pytest.approx(1.0, abs=1e-6)


def test_the_swimlane_shows_the_stages() -> None:
    found = run("replicas=2 stages=2 micro_batches=4", trace=True)
    actions = [span for span in found.spans if span.action in ("forward", "backward")]
    assert {(span.replica, span.stage) for span in actions} == {(r, s) for r in (0, 1) for s in (0, 1)}
    assert len(actions) == 6 * 2 * 2 * 4 * 2
    assert not any(span.action == "compute" for span in found.spans)
    for first in (s for s in actions if s.stage == 0 and s.action == "forward"):
        same = [
            s for s in actions if (s.replica, s.step, s.micro_batch) == (first.replica, first.step, first.micro_batch)
        ]
        second = next(s for s in same if s.stage == 1 and s.action == "forward")
        assert second.start_ns >= first.end_ns - 1  # each end is rounded to whole nanoseconds


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_streams_are_refused(schedule: str) -> None:
    with pytest.raises(InputError, match=f"schedule={schedule} moves weights within a stream.*engine='local'"):
        run(f"stages=2 schedule={schedule} micro_batches=1")


def test_branches_are_balanced_without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured differs from run to run, and virtual time does not."""

    def measured(*_: Any) -> Any:
        raise AssertionError("somebody measures")

    monkeypatch.setattr("paceline.replica.tensor.prepare.measure_op_times", measured)
    assert 0.5 <= run("shards=2 shard_rules=b*:branch", branches).summary["notes"]["time_of_one_process"] < 1
    with pytest.raises(AssertionError, match="somebody measures"):
        run("shards=2 shard_rules=b*:branch", branches, times="compute=measured")
