"""Replicas that come and go within bounds: by request, by death, and over a break; each sample of an epoch once."""

import contextlib
import functools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InputError, Run, resume
from paceline.core.safe_files import write_json
from paceline.engine.base import Progress
from paceline.engine.local.engine import LocalEngine
from paceline.engine.scaling import ANSWER, REQUEST
from tests.engine import programs
from tests.engine.local import leaks, moments
from tests.engine.local.commands import eventually

Local = Callable[..., Run]
Act = Callable[[int], None]

# Its trained weights count how often each sample was applied.
COUNTING = moments.counting_any_batch()

POLICIES = ["synchronous:combine=sum", "asynchronous", "smooth-switch:every=5,combine=sum", "buffered:k=2,combine=sum"]


def slowly(worker: Any) -> None:
    """The plain loop, at a pace at which main looks around between two updates."""
    for batch in worker.batches():
        threading.Event().wait(0.003)
        worker.step(batch)


@contextlib.contextmanager
def watching(act: Act) -> Iterator[None]:
    """Context manager: ``act`` is called in the main process with the number of updates, again and again."""

    def watch(progress: Progress) -> None:
        if progress.phase == "training":
            act(progress.updates)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("paceline.engine.loop", "paceline.engine.local.membership"):
            patch.setattr(f"{module}.TICK_S", 0.0)
        patch.setattr("paceline.api.train.watcher", lambda *_: nullcontext(watch))
        yield


def together(worker: Any, *, folder: Path, replicas: int) -> None:
    """The plain loop; each replica waits before its third step until so many have made one."""
    for made, batch in enumerate(worker.batches()):
        (folder / f"replica {worker.replica}").touch()
        if made == 2:
            eventually(lambda: len([*folder.glob("replica *")]) >= replicas)
        threading.Event().wait(0.003)
        worker.step(batch)


def asks(folder: Path, at: Mapping[int, int]) -> Act:
    """Return a function that asks for so many replicas once there are so many updates."""
    rest = dict(sorted(at.items()))

    def act(updates: int) -> None:
        if rest and updates >= next(iter(rest)):
            moment = next(iter(rest))
            write_json(folder / REQUEST, {"request": str(moment), "replicas": rest.pop(moment)})

    return act


def kills(folder: Path, at: list[tuple[int, int]]) -> Act:
    """Return a function that kills the worker of a replica once there are so many updates, if it is there."""
    rest = sorted(at)

    def act(updates: int) -> None:
        if rest and updates >= rest[0][0]:
            rows = json.loads((folder / "workers.json").read_text())
            pids = [row["pid"] for row in rows if row["role"] == "replica" and row["replica"] == rest[0][1]]
            if pids:
                os.kill(pids[0], signal.SIGKILL)
                rest.pop(0)

    return act


def steps_of(run: Run) -> Counter[int]:
    """Return the steps of each replica of a traced run."""
    return Counter(span.replica for span in run.spans if span.action == "push")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_epoch_is_exact_while_replicas_come_and_go(local: Local, tmp_path: Path, policy: str) -> None:
    """Trained weights count how often each sample was applied."""
    before, folder = leaks.files(), tmp_path / "run"
    loop = functools.partial(together, folder=tmp_path, replicas=4)
    settings = {"out": folder, "trace": True, "suspect_after_s": 60.0}
    with watching(asks(folder, {1: 4, 16: 1, 40: 3})):
        run = local(COUNTING, f"replicas=1..4 aggregation={policy}", epochs=8, loop=loop, **settings)
    assert run.state["weight"].tolist() == [8.0] * moments.SAMPLES
    assert run.summary.get("not_saved") is None
    assert not run.left
    steps = steps_of(run)
    assert set(steps) == {0, 1, 2, 3}, "all have come"
    assert steps[0] > steps[3] > 0
    assert not (folder / ANSWER).exists()
    assert not leaks.since(before)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_epoch_is_exact_though_replicas_die(local: Local, tmp_path: Path, policy: str) -> None:
    folder = tmp_path / "run"
    loop = functools.partial(together, folder=tmp_path, replicas=4)
    asked, killed = asks(folder, {1: 4}), kills(folder, [(16, 3), (20, 2), (28, 1)])
    with watching(lambda updates: (asked(updates), killed(updates))[0]):
        run = local(
            COUNTING,
            f"replicas=1..4 aggregation={policy}",
            epochs=8,
            loop=loop,
            out=folder,
            on_death="continue",
            suspect_after_s=60.0,
        )
    assert sorted(exit_.replica for exit_ in run.left) == [1, 2, 3]
    assert run.state["weight"].tolist() == [8.0] * moments.SAMPLES


def test_with_a_fixed_number_the_others_take_what_a_dead_one_has_left(local: Local, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with watching(kills(folder, [(5, 1)])):
        run = local(
            COUNTING,
            "replicas=3 aggregation=synchronous:combine=sum",
            epochs=4,
            loop=slowly,
            out=folder,
        )
    assert [exit_.replica for exit_ in run.left] == [1]
    assert run.state["weight"].tolist() == [4.0] * moments.SAMPLES


def test_no_fewer_than_the_bound(local: Local, tmp_path: Path) -> None:
    """A death below the lower bound is made good."""
    folder = tmp_path / "run"
    with watching(kills(folder, [(5, 0), (10, 1)])):
        run = local(COUNTING, "replicas=2..4 aggregation=asynchronous", epochs=5, loop=slowly, out=folder)
    assert {exit_.reason for exit_ in run.left} == {"killed by SIGKILL; replaced"}
    assert run.state["weight"].tolist() == [5.0] * moments.SAMPLES


def test_steps_are_those_of_the_run(local: Local, tmp_path: Path) -> None:
    """One that comes later makes as many as the others still have to make."""
    folder = tmp_path / "run"
    loop = functools.partial(together, folder=tmp_path, replicas=3)
    settings = {"out": folder, "trace": True, "suspect_after_s": 60.0}
    with watching(asks(folder, {1: 3})):
        run = local(programs.program(), "replicas=2..3", steps=40, loop=loop, **settings)
    steps = steps_of(run)
    assert steps[0] == steps[1] == 40
    assert 0 < steps[2] < 40
    assert run.history[-1].updates == 40


@pytest.mark.parametrize(
    ("strategy", "asked", "said"),
    [("replicas=1..2", 3, "out of its bounds, replicas=1..2"), ("replicas=2", 1, "replicas=2 are fixed")],
)
def test_what_is_not_to_be_had_changes_nothing(
    local: Local, tmp_path: Path, strategy: str, asked: int, said: str
) -> None:
    folder, answers = tmp_path / "run", list[dict[str, Any]]()
    request = asks(folder, {2: asked})

    def act(updates: int) -> None:
        request(updates)
        if (folder / ANSWER).exists() and not answers:
            answers.append(json.loads((folder / ANSWER).read_text()))

    with watching(act):
        run = local(programs.program(), strategy, steps=30, loop=slowly, out=folder)
    assert said in answers[0]["refused"]
    assert answers[0]["replicas"] == answers[0]["before"] == len(run.summary["utilisation"])


@pytest.mark.parametrize("second", ["replicas=1..4", "replicas=2", "replicas=3"])
def test_an_epoch_is_exact_over_a_break(local: Local, tmp_path: Path, engine: LocalEngine, second: str) -> None:
    """Broken off at any moment, with Δs under way, then ended under another number of replicas."""
    sums, save = " aggregation=synchronous:combine=sum", {"checkpoint": tmp_path / "ckpt"}

    def interrupts(updates: int) -> None:
        if updates >= 9:
            signal.raise_signal(signal.SIGTERM)

    with watching(interrupts):
        run = local(COUNTING, "replicas=1..4 aggregation=asynchronous", epochs=3, loop=slowly, **save)
    assert run.summary["signal"] == "SIGTERM"
    run = resume(tmp_path / "ckpt", COUNTING, second + sums, engine=engine, epochs=3, progress=False)
    assert run.state["weight"].tolist() == [3.0] * moments.SAMPLES


def test_a_loop_that_leaves_batches_out_is_told_so(local: Local) -> None:
    def leaving_out(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            if k % 3:
                worker.step(batch)

    with pytest.raises(InputError, match="made no step on a batch"):
        local(programs.program(), "replicas=1..2", steps=9, loop=leaving_out)


@pytest.mark.parametrize(
    ("strategy", "settings", "said"),
    [
        ("replicas=2..4", {"engine": "virtual"}, "the number of replicas is fixed"),
        ("replicas=2..4 partition=disjoint", {}, "write partition=global"),
        ("replicas=2..4 aggregation=hogwild", {}, "write aggregation=asynchronous"),
        ("replicas=2..4", {"on_death": "stop"}, "leave on_death out"),
        ("replicas=4..2", {}, "write replicas=2..4"),
        ("replicas=2..x", {}, "write replicas=4 or replicas=2..8"),
        ("replicas=0..2", {}, "least_replicas"),
    ],
)
def test_bounds_that_can_not_be_kept_are_refused(strategy: str, settings: dict[str, Any], said: str) -> None:
    from paceline.api.train import check

    with pytest.raises(InputError, match=said):
        check(programs.program(), strategy, steps=1, **settings)


def test_a_global_batch_needs_a_fixed_number() -> None:
    from paceline.api.train import check

    program = programs.program(batch_size=None, global_batch_size=12)
    with pytest.raises(InputError, match="write batch_size= in the program, or replicas=4"):
        check(program, "replicas=2..4", steps=1)


def test_gangs_come_and_go(local: Local, tmp_path: Path) -> None:
    """Replicas of two workers, as one."""
    folder = tmp_path / "run"
    with watching(asks(folder, {3: 2, 12: 1})):
        run = local(programs.program(), "replicas=1..2 shards=2", steps=30, loop=slowly, out=folder)
    assert len(run.summary["utilisation"]) == 4
    assert all(torch.isfinite(value).all() for value in run.state.values())


def test_texts_of_bounds() -> None:
    from paceline import Strategy

    strategy = Strategy.parse("replicas=2..8 aggregation=asynchronous")
    assert (strategy.replicas, strategy.least_replicas, strategy.elastic) == (8, 2, True)
    assert Strategy.parse(str(strategy)) == strategy == Strategy.from_toml(strategy.to_toml())
    assert functools.reduce(lambda text, _: str(Strategy.parse(text)), range(3), str(strategy)) == str(strategy)
