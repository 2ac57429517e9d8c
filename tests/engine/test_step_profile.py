"""What a step will take, put together of measured pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from paceline import Strategy, train
from paceline.core.types import Seconds
from paceline.engine.base import Budget, Job
from paceline.engine.run_context import RunContext
from paceline.engine.step_profile import forecast
from paceline.engine.step_profile.comm import CollectiveCall, FakeShards, MessageTime
from paceline.engine.step_profile.compute import Pass, RankProfile
from paceline.engine.step_profile.forecast import Forecast, Measurements
from paceline.engine.virtual.durations import MeasuredDurations
from paceline.engine.virtual.engine import VirtualEngine
from paceline.schedule import Dependencies
from tests import zoo
from tests.engine.tensor_cases import Case

REDUCE = CollectiveCall("all_reduce", 8, torch.float32)

STAGE = {(part, kind): [seconds] for part in (0, 1) for kind, seconds in (("forward", 1.0), ("backward", 2.0))}


def job(strategy: str) -> Job:
    return Job(Case(zoo.tied).program, Strategy.parse(strategy), Budget("steps", 2, 2, None))


Heard = tuple[RankProfile, Mapping[CollectiveCall, Seconds], Mapping[int, MessageTime]]


def of(monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: Sequence[Heard], request_s: Seconds = 0.0) -> Forecast:
    """The forecast from these measurements."""
    profiles, collectives, messages = zip(*ranks, strict=True)
    slowest = {call: max(each[call] for each in collectives) for call in collectives[0]}
    measured = Measurements(profiles, slowest, messages[0])
    monkeypatch.setattr(forecast, "measure_on_ranks", lambda *_: ([measured], request_s))
    return forecast.forecast(job(strategy))


def heard(
    profile: RankProfile,
    collectives: Mapping[CollectiveCall, Seconds] | None = None,
    messages: Mapping[int, MessageTime] | None = None,
) -> Heard:
    return profile, collectives or {}, messages or {}


def test_a_silent_shard_gives_what_has_the_right_shape_and_says_what_it_was_asked() -> None:
    shard = FakeShards(1, 3)
    shard.begin()
    assert shard.all_reduce(torch.ones(2, 3), "").shape == (2, 3)
    assert [each.shape for each in shard.all_gather(torch.ones(2), [(3,), (2,), (2,)], "")] == [(3,), (2,), (2,)]
    assert shard.reduce_scatter([torch.ones(4), torch.ones(3), torch.ones(3)], "").shape == (3,)
    assert shard.broadcast(torch.ones(5), 0, "").shape == shard.reduce(torch.ones(5), 0, "").shape == (5,)
    kinds = [("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 4), ("broadcast", 5), ("reduce", 5)]
    assert [(call.kind, call.elements) for call in shard.calls] == kinds
    assert len(shard.segments()) == len(kinds) + 1
    for call in shard.calls:  # the same again, of the size that matters
        call.execute(again := FakeShards(0, 3))
        assert again.calls == [call]


def test_stages_take_what_their_schedule_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """(m + p - 1) forward and backward passes, and a word to main and back."""
    passes = [Pass(0.25, (), 0.5)]
    seen = of(monkeypatch, "stages=2 micro_batches=4", [heard(RankProfile(passes, stages=STAGE))], request_s=0.5)
    assert seen.compute_s == pytest.approx([5 * 3.0])
    assert (seen.pull_s, seen.push_s) == pytest.approx((0.5, 0.75))
    assert max(action.end_ns for action in seen.replica_timing.actions) == 15 * 10**9


def test_messages_keep_both_ends_busy_and_take_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one micro-batch: a value there and its gradient back, one after the other."""
    found = RankProfile([Pass(0.0, (), 0.0)], stages=STAGE, sent_bytes={(0, 1): [64]})
    said = [heard(found, messages={64: MessageTime(send=0.1, receive=0.2, transit=0.4)})]
    seen = of(monkeypatch, "stages=2 micro_batches=1", said)
    assert seen.compute_s == pytest.approx([2 * 3.0 + 2 * 0.7])


def test_branches_wait_for_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the example of the simulator has it: 30 with a fork, where a chain takes 33; parts that send take longer."""
    stages = {(part, kind): STAGE[0, kind] for part in range(4) for kind in ("forward", "backward")}
    fork = Dependencies.parse(4, "0-1 0-2 1-3 2-3")
    of_fork = RankProfile([Pass(0.0, (), 0.0)], stages=stages, needs=fork)
    seen = of(monkeypatch, "stages=4 micro_batches=8 schedule=gpipe", [heard(of_fork)])
    assert seen.compute_s == pytest.approx([30.0])
    assert seen.replica_timing.needs == fork
    sending = replace(of_fork, sent_bytes={(0, 2): [64]})
    slower = of(
        monkeypatch, "stages=4 micro_batches=8 schedule=gpipe", [heard(sending, messages={64: MessageTime(1.0)})]
    )
    assert slower.compute_s[0] > 30.0


def test_collectives_of_a_stage_count_as_often_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {(part, kind): [REDUCE, REDUCE] for part, kind in STAGE}
    found = RankProfile([Pass(0.0, (), 0.0)], stages=STAGE, stage_calls=calls)
    said = [heard(found, {REDUCE: 0.1}), heard(found, {REDUCE: 0.25})]
    seen = of(monkeypatch, "stages=2 micro_batches=1 shards=2", said)
    assert seen.compute_s == pytest.approx([2 * (3.0 + 4 * 0.25)])


def test_shards_wait_for_the_slowest_before_each_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        RankProfile([Pass(0.0, (1.0, 5.0), 0.0)], [REDUCE], [REDUCE]),
        RankProfile([Pass(0.0, (3.0, 2.0), 0.0)], [REDUCE], [REDUCE]),
    ]
    seen = of(monkeypatch, "shards=2", [heard(each, {REDUCE: 0.5}) for each in found])
    assert seen.compute_s == pytest.approx([3.0 + 5.0 + 0.5])
    assert seen.push_s == pytest.approx(0.5)


def test_replicas_draw_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each its own, the same from the same seed; an update takes what it takes for so many."""
    seen = of(monkeypatch, "replicas=2", [heard(RankProfile([Pass(0.0, (float(n),), 0.0) for n in (1, 2, 3)]))])
    draws = [
        [MeasuredDurations(RunContext(job("replicas=2")), seen).attempt(r, 2).compute for _ in range(2)] for r in (0, 1)
    ]
    made = MeasuredDurations(RunContext(job("replicas=2")), seen)
    assert [made.attempt(0, 2).compute for _ in range(20)] != [made.attempt(1, 2).compute for _ in range(20)]
    assert draws[0][0] == draws[0][1]
    assert {made.attempt(0, 1).compute for _ in range(60)} == {1.0, 2.0, 3.0}
    assert 0 < made.update(2) == made.update(2)


@pytest.mark.parametrize("strategy", ["shards=2", "stages=2 shards=2 micro_batches=2"])
def test_it_is_measured_and_computes_what_one_process_does(strategy: str) -> None:
    words = {"engine": VirtualEngine(), "steps": 2, "progress": False}
    program = Case(zoo.tied).program
    found, expected = train(program, strategy, times="measured", **words), train(program, "replicas=1", **words)
    assert all(torch.equal(found.state[name], value) for name, value in expected.state.items())
    computed = found.summary["notes"]["compute_measured_s"]
    assert 0 < computed < found.summary["seconds"]  # of two steps, each drawn from the measured passes


def test_a_worker_updates_its_own_part_of_a(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [RankProfile([Pass(0.0, (1.0,), 0.0)], steps_on=share) for share in (0.25, 0.75)]
    seen = of(monkeypatch, "shards=2", [heard(found) for found in shares])
    assert seen.steps_on == 0.75, "the step ends when the largest part is updated"
    asked = list[float]()
    monkeypatch.setattr("paceline.engine.virtual.durations.update_s", lambda job, n, part: asked.append(part) or part)
    assert MeasuredDurations(RunContext(job("shards=2")), seen).update(1) == 0.75
    assert asked == [0.75]


def test_parts_of_stages_and_shards_are_what_they_hold() -> None:
    whole = of_parameters(zoo.tied().model())
    for strategy in ("stages=2", "shards=2"):
        run = train(Case(zoo.tied).program, strategy, steps=1)
        share = max(run.summary["parameter_bytes"]) / whole
        assert forecast.forecast(job(strategy)).steps_on == pytest.approx(share), strategy


def of_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
