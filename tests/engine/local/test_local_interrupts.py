"""Ctrl-C, as a real signal, in each phase of a run: what there is of it comes back, and nothing is left."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Run
from paceline.engine.base import Progress, Watcher
from paceline.engine.coordinator import Coordinator
from paceline.engine.loop import InterruptGuard
from tests.engine import programs
from tests.engine.local import moments

Local = Callable[..., Run]

ENDLESS = 10**6


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def at(phase: str, times: int = 1) -> Watcher:
    """Presses Ctrl-C when a phase is first seen."""
    pressed: list[Progress] = []

    def watch(progress: Progress) -> None:
        if progress.phase == phase and progress.work not in ("importing", "capturing") and not pressed:
            pressed.append(progress)
            for _ in range(times):
                ctrl_c()

    return watch


@pytest.fixture(autouse=True)
def _handler_comes_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_while_it_starts(local: Local, watched: list[Watcher]) -> None:
    """A_0 is what there is, scored; no model that is still being built is waited for."""
    watched.append(at("starting"))
    program = programs.program(model=functools.partial(slow_model, moments.here()), test=programs.data())
    run = local(program, "replicas=2", steps=ENDLESS, timeout_s=1000)
    assert run.summary["interrupted"]
    assert run.summary["updates"] == run.summary["gradients"] == 0
    assert run.left == []
    program = programs.program()
    assert all(torch.equal(run.state[n], v) for n, v in program.build().state_dict().items())


def slow_model(main: int) -> torch.nn.Module:
    """Elsewhere than in main, workers never have it; the scorer has."""
    if os.getpid() != main and os.sched_getscheduler(0) != os.SCHED_IDLE:
        moments.hang(None)
    return programs.mlp()


@pytest.mark.parametrize("policy", ["synchronous", "asynchronous", "buffered:k=2,hold=false", "hogwild"])
def test_while_it_trains(local: Local, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    plain = Coordinator.arrived

    def arrived(self: Coordinator, arrival: Any) -> None:
        plain(self, arrival)
        if self.tally.gradients == 30:
            ctrl_c()

    monkeypatch.setattr(Coordinator, "arrived", arrived)
    run = local(programs.program(), f"replicas=2 aggregation={policy}", steps=ENDLESS, evaluate_every=5)
    assert run.summary["interrupted"]
    assert run.left == []
    assert run.summary["gradients"] == run.summary["applied"] + run.summary["discarded"] >= 30
    assert run.history[-1].updates == run.summary["updates"] > 0
    assert run.history[-1].train_loss is not None


def test_in_a_step_that_never_ends(local: Local, watched: list[Watcher]) -> None:
    """The second Ctrl-C says not to wait for it."""
    loop = functools.partial(moments.loop, replica=1, step=2, prepare=moments.hang)
    twice: list[float] = []

    def watch(progress: Progress) -> None:
        if progress.gradients == 3 and len(twice) < 2:
            twice.append(progress.time_s)
            ctrl_c()
            ctrl_c()

    watched.append(watch)
    run = local(programs.program(), "replicas=2", steps=ENDLESS, loop=loop, timeout_s=1000)
    assert run.summary["interrupted"]
    assert run.summary["updates"] == 1
    assert run.left == []


@pytest.mark.parametrize(("times", "records"), [(1, 0), (2, 0)])
def test_while_it_is_scored(local: Local, watched: list[Watcher], times: int, records: int) -> None:
    """Scoring ends there; the model is there."""
    metric = functools.partial(never_here, moments.here())
    program = programs.program(test=programs.data(), metrics={"accuracy": metric})
    watched.append(at("scoring", times))
    run = local(program, "replicas=2", steps=3, timeout_s=1000)
    assert run.summary["interrupted"]
    assert run.summary["updates"] == 3
    assert len(run.history) == records
    assert run.summary["test_accuracy"] is None


def never_here(main: int, output: torch.Tensor, target: torch.Tensor) -> float:
    """Main tries a metric before anything starts; in the scorer it never ends."""
    if os.getpid() != main:
        moments.hang(None)
    return 0.5


def test_then_while_it_is_scored(local: Local, watched: list[Watcher]) -> None:
    """One ends training, the next one scoring."""
    metric = functools.partial(never_here, moments.here())
    program = programs.program(test=programs.data(), metrics={"accuracy": metric})
    presses = [at("training"), at("scoring")]
    watched.append(lambda progress: [press(progress) for press in presses] and None)
    run = local(program, "replicas=2", steps=ENDLESS, timeout_s=1000)
    assert run.summary["interrupted"]
    assert run.history == []


def test_a_third_one_is_raised(local: Local, watched: list[Watcher]) -> None:
    watched.append(at("training", times=3))
    with pytest.raises(KeyboardInterrupt):
        local(programs.program(), "replicas=2", steps=ENDLESS)


def test_a_run_in_another_thread_leaves_signals_alone(local: Local) -> None:
    runs: list[Run] = []
    handler = signal.getsignal(signal.SIGINT)

    def carry() -> None:
        runs.append(local(programs.program(), "replicas=2", steps=5))
        assert signal.getsignal(signal.SIGINT) is handler

    thread = threading.Thread(target=carry)
    thread.start()
    thread.join()
    assert [run.summary["updates"] for run in runs] == [5]


def test_the_first_one_is_heard_before_the_run_ends() -> None:
    heard, said = list[str](), threading.Event()

    def hear(first: str) -> None:
        heard.append(first)
        said.set()

    with InterruptGuard(lambda: None, hear) as interrupts:
        ctrl_c()
        assert said.wait(60)
        ctrl_c()
        assert interrupts.insisted
    assert heard == ["SIGINT"]


@pytest.mark.parametrize("progress", [None, False])
def test_it_is_said_on_stderr(
    local: Local, watched: list[Watcher], capsys: pytest.CaptureFixture[str], tmp_path: Path, progress: bool | None
) -> None:
    watched.append(at("training"))
    folder = tmp_path / "ckpt"
    run = local(programs.program(), "replicas=2", steps=ENDLESS, checkpoint=folder, progress=progress)
    assert run.summary["interrupted"]
    line = f"paceline: Ctrl-C: training ends, the model is saved in {folder} and evaluated; a second Ctrl-C "
    assert [text.startswith(line) for text in capsys.readouterr().err.splitlines()] == [True] * (progress is None)
