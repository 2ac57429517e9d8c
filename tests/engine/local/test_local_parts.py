"""The parts of a run, each by itself: scripts, the desk, the board, figures."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm import liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_pickle import share
from paceline.core.errors import InputError, PacelineError
from paceline.core.mesh import Coordinate
from paceline.core.records import Record
from paceline.engine import worker_metrics
from paceline.engine.base import Budget, Job
from paceline.engine.client_worker import SHORT_STEP_NS, Cancelled, ForwardChecks
from paceline.engine.evaluation import SnapshotInfo
from paceline.engine.local import engine as engine_module
from paceline.engine.local.arena import ArenaLayout, ParameterArena
from paceline.engine.local.control_block import ARRIVED, CANCELLED, Completion, MetricsBlock
from paceline.engine.local.engine import PRELOAD, LocalEngine
from paceline.engine.local.evaluation_process import EvaluationProcess
from paceline.engine.local.fault_injection import EventScript, FaultInjector
from paceline.engine.worker_metrics import Figures, WorkerMetrics, worker_figures
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.strategy import Strategy
from paceline.trace.recorder import NullRecorder
from tests.engine import programs
from tests.engine.local.leaks import files

# -------------------------------------------------------------------------------------------------------------- scripts


def report(attempt: int, at_ns: int = 0, ending: int = ARRIVED) -> Completion:
    return Completion(ending, attempt, 0, 0, 4, True, 0.5, at_ns)


def cues(
    script: EventScript, told: dict[int, Completion], present: set[int], voided: frozenset[int] = frozenset()
) -> list[tuple[int, int]]:
    """(replica, attempt) of what is taken, where no further report comes in the meantime."""
    coordinator: Any = SimpleNamespace(present=present, cancelling=voided)
    director = FaultInjector(script, lambda replica, number: None)
    return [(r, told.pop(r).attempt) for r, _ in director.due(lambda: list(told.items()), coordinator)]


def test_without_a_script_reports_are_taken_as_they_were_made() -> None:
    assert cues(EventScript(), {0: report(1, 30), 1: report(1, 10), 2: report(2, 20)}, {0, 1, 2}) == [
        (1, 1),
        (2, 2),
        (0, 1),
    ]


@pytest.mark.parametrize(
    ("order", "present", "taken"),
    [
        ([(2, 1), (0, 1), (1, 1)], {0, 1, 2}, [(2, 1), (0, 1), (1, 1)]),
        ([(2, 1), (2, 2), (0, 1)], {0, 1, 2}, [(2, 1)]),  # the next one has not come
        ([(3, 1), (1, 1)], {0, 1, 2}, [(1, 1), (0, 1), (2, 1)]),  # one that left is skipped; then as they come
        ([(1, 1)], {1, 2}, [(0, 1), (1, 1), (2, 1)]),  # a report of one that left is nobody's
    ],
)
def test_an_order_holds_reports_back(
    order: list[tuple[int, int]], present: set[int], taken: list[tuple[int, int]]
) -> None:
    told = {r: report(1, at_ns=r) for r in range(3)}
    assert cues(EventScript().order(*order), told, present) == taken


def test_replicas_stop_before_the_next_arrival() -> None:
    script, everyone = EventScript().order((0, 1), (1, 2)), {0, 1, 2}
    assert cues(script, {0: report(1)}, everyone, frozenset({1})) == []
    stopped = {0: report(1), 1: report(1, ending=CANCELLED)}
    assert cues(script, stopped, everyone) == [(1, 1), (0, 1)]
    overtaken = {0: report(1), 1: report(1)}  # its Δ came all the same
    assert cues(script, overtaken, everyone, frozenset({1})) == [(1, 1)]


def test_faults_meet_their_moment_alone() -> None:
    sent: list[tuple[int, int]] = []
    script = EventScript().kill(replica=1, step=3).stop(replica=0, step=2, when="taken")
    director = FaultInjector(script, lambda replica, number: sent.append((replica, number)))
    for replica in (0, 1):
        for step in (1, 2, 3, 4):
            director.inject(replica, step)
            director.inject(replica, step, "taken")
    assert sent == [(0, 19), (1, 9)]


# ---------------------------------------------------------------------------------------------------- where scores wait


@pytest.fixture
def fork_server(engine: LocalEngine) -> ForkServer:
    """That of the engine, with all imports made."""
    return engine._fork_server_with(PRELOAD)


MOMENT = SnapshotInfo(0.0, 0, 0, 1, None, None)


@pytest.fixture
def desk(fork_server: ForkServer) -> Iterator[Callable[..., tuple[EvaluationProcess, FlatState]]]:
    opened: list[Callable[[], None]] = []

    def make(**fields: Any) -> tuple[EvaluationProcess, FlatState]:
        job = Job(programs.program(metrics={}, **fields), Strategy(replicas=1), Budget("steps", 1, 1), timeout_s=30)
        module = job.program.build()
        layout = FlatLayout.of(module)
        parcel = share(job)
        opened.append(parcel.close)
        it = EvaluationProcess(job, fork_server, parcel, layout, idle_only=False)
        opened.append(it.close)
        return it, read(module, layout.new())

    yield make
    for close in reversed(opened):
        close()
    assert not fork_server._children


def collected(desk: EvaluationProcess, count: int) -> list[Record]:
    """As many records as there are to come."""
    records: list[Record] = []
    while len(records) < count:
        desk.link.settimeout(60)
        records += desk._receive(60)
    return records


def test_snapshots_are_scored_one_after_the_other_as_they_were(desk: Any) -> None:
    it, state = desk()
    for value in (0.0, 1.0, 2.0):
        for vector in state.parameters:
            vector.fill_(value)
        it.hand_in(state, MOMENT)
    assert len(it.queue.snapshots) == 3
    losses = [record.train_loss for record in collected(it, 3)]
    assert len(it.queue.snapshots) == 0
    assert losses[0] == pytest.approx(float(torch.log(torch.tensor(3.0))), abs=1e-6)  # of zeros, all classes are equal
    assert len({*losses}) >= 2 or losses[1] == losses[2] == losses[0]


def test_where_memory_is_short_handing_in_waits(desk: Any) -> None:
    it, state = desk()
    it.queue._capacity = 2
    for _ in range(6):
        it.hand_in(state, MOMENT)
        assert len(it.queue.snapshots) <= 2
    early = it.collect()
    assert len(early) + len(it.queue.snapshots) == 6
    assert len(collected(it, len(it.queue.snapshots))) == 6 - len(early)


def test_what_a_killed_scorer_has_left_is_scored_here(desk: Any) -> None:
    it, state = desk()
    liveness.kill(it.child.pidfd)
    assert liveness.wait_gone([it.child.pidfd], 60)
    for _ in range(3):
        it.hand_in(state, MOMENT)
    it.collect()
    assert not it.alive
    assert len({record.train_loss for record in it.evaluate_rest()}) == 1
    assert len(it.queue.snapshots) == 0


# -------------------------------------------------------------------------------------------------- metrics


@pytest.fixture
def metrics() -> MetricsBlock:
    return MetricsBlock(memoryview(bytearray(8 * 2 * MetricsBlock.WORDS)), workers=2)


def test_memory_that_cannot_be_had_is_let_go_of() -> None:
    before = files()
    layout = FlatLayout.of(torch.nn.Linear(500_000, 500_000, device="meta"))
    with pytest.raises(PacelineError, match="bytes of shared memory can't be had"):
        ParameterArena(ArenaLayout(layout, 2, 1, optimizer_vectors=2, workers=2))
    assert files() == before


@pytest.mark.parametrize(("per_step", "steps"), [(1, 6), (3, 2)])
def test_a_step_may_be_several_micro_steps(metrics: MetricsBlock, per_step: int, steps: int) -> None:
    gauge = WorkerMetrics(metrics, 1, NullRecorder(), step_bytes=100, per_step=per_step)
    gauge.start()
    for k in range(6):
        gauge.stepped(pushed=k % 3 == 2)
    gauge.close()
    seen = worker_figures(Coordinate(1), metrics.figures(1), metrics.step_times(1), parameter_bytes=7, seconds=1000.0)
    assert (seen.steps, seen.payload_bytes, seen.parameter_bytes) == (steps, 200, 7)
    assert len(metrics.step_times(1)) == steps
    assert worker_figures(Coordinate(0), metrics.figures(0), metrics.step_times(0), 7, 1.0).step_time_s is None


@pytest.mark.parametrize(("steps", "looked"), [(2, 3), (3, 3), (4, 3), (20, 5)])
def test_memory_is_read_while_others_are_there(
    metrics: MetricsBlock, steps: int, looked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 1, 2, 4, 8 and 16 micro-steps; at the end only where it may have grown since."""
    read: list[int] = []

    def peak_bytes() -> int:
        read.append(1000 + len(read))
        return read[-1]

    monkeypatch.setattr(worker_metrics, "peak_bytes", peak_bytes)
    gauge = WorkerMetrics(metrics, 1, NullRecorder(), step_bytes=100, per_step=1)
    gauge.start()
    for _ in range(steps):
        gauge.stepped(pushed=True)
    gauge.close()
    assert len(read) == looked
    assert metrics.figures(1).peak_memory_bytes == read[-1]


def test_what_was_given_back_counts_for_the_most_that_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = {"VmRSS": 60, "VmHWM": 100, "Pss": 25}
    monkeypatch.setattr(worker_metrics, "_kernel_bytes", lambda path, name: kernel[name])
    assert worker_metrics.peak_bytes() == 25 + 40


def test_waits_within_a_step_are_no_work(metrics: MetricsBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(worker_metrics.time, "monotonic_ns", lambda: now)
    recorder = NullRecorder()
    gauge = WorkerMetrics(metrics, 0, recorder, step_bytes=100, per_step=1)
    recorder.wait(0, 0, 50)
    now = 100
    gauge.start()
    recorder.wait(1, 110, 130)
    gauge.waited(140, 1, 170)
    now = 200
    gauge.stepped(pushed=True)
    assert metrics.figures(0).busy_ns == 100 - 20 - 30


def test_a_cancelled_step_counts_whole(metrics: MetricsBlock) -> None:
    gauge = WorkerMetrics(metrics, 0, NullRecorder(), step_bytes=100, per_step=3)
    gauge.start()
    gauge.stepped(pushed=False)
    gauge.stepped(pushed=False, skipped=1)
    assert metrics.figures(0).steps == 1


def test_a_forward_pass_is_broken_off_unless_steps_are_short() -> None:
    client: Any = SimpleNamespace(to_break_off=lambda: True)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    checks = ForwardChecks(module, client)
    for took_ns in (SHORT_STEP_NS, SHORT_STEP_NS - 1) * 2:
        checks.advanced(took_ns)
        with pytest.raises(Cancelled) if took_ns == SHORT_STEP_NS else nullcontext():
            module(torch.ones(1, 2))


def test_nobody_is_busier_than_the_run_was_long(metrics: MetricsBlock) -> None:
    metrics.measure(0, Figures(1, int(5e9), 0, 0))
    assert worker_figures(Coordinate(0), metrics.figures(0), [], 0, seconds=2.0).busy_s == 2.0


def test_a_child_that_is_forgotten_has_gone(fork_server: ForkServer) -> None:
    fork_server.wait_ready()
    before = files()
    child = fork_server.spawn("tests.engine.local.moments:rest", {})
    watched = liveness.open_pid(child.pid)
    fork_server.forget(child)
    fork_server.forget(child)
    assert not liveness.alive(watched)
    os.close(watched)
    assert files() == before
    assert fork_server.alive


@pytest.mark.parametrize(
    ("place", "devices", "said"),
    [
        ("cpu", 1, "processes can't share the memory of device=xpu; write device=cpu, or aggregation=asynchronous"),
        ("xpu:0", 2, "this host has 2 of device=xpu; write aggregation=asynchronous, or let this process see one"),
        ("xpu:0", 1, None),
    ],
)
def test_replicas_that_write_one_a_need_one_device(
    monkeypatch: pytest.MonkeyPatch, place: str, devices: int, said: str | None
) -> None:
    monkeypatch.setattr(engine_module, "refuse_absent", lambda kind: None)
    monkeypatch.setattr(engine_module, "arena_device", lambda kind: torch.device(place))
    monkeypatch.setattr(engine_module, "count", lambda kind: devices)
    job: Any = SimpleNamespace(strategy=Strategy.parse("replicas=2 aggregation=hogwild device=xpu"))
    with LocalEngine() as engine, nullcontext() if said is None else pytest.raises(InputError, match=said):
        engine.refuse(job)
