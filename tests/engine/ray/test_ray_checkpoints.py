"""Runs on Ray are saved while they last, and go on from what any engine has saved, also after SIGTERM or a death."""

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from paceline import Run, WorkerError, train
from paceline.checkpoint.reader import Checkpoint, newest
from paceline.comm import liveness
from paceline.engine.base import Progress, Watcher
from paceline.engine.local.engine import LocalEngine
from paceline.engine.ray.engine import RayEngine
from tests import oracle
from tests.engine import programs
from tests.engine.local.commands import PATIENCE_S, PROGRAM, eventually
from tests.engine.ray.commands import SAVED, started

pytest.importorskip("ray", reason="needs Ray: pip install 'paceline[ray]'")

OnRay = Callable[..., Run]

ADAM = {"optimizer": functools.partial(Adam, lr=0.01), "scheduler": functools.partial(StepLR, step_size=4, gamma=0.5)}
ENDLESS = 10**6


def newest_in(folder: Path) -> Checkpoint:
    """The newest checkpoint; all of them are sound."""
    checkpoint, damaged = newest(folder)
    assert checkpoint is not None
    assert not damaged
    return checkpoint


def tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """The hash of all tensors: A, the optimizer's, Δs that are held."""
    return {name: info.sha256 for name, info in checkpoint.manifest.files.items()}


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(on_ray: OnRay, tmp_path: Path) -> None:
    program, strategy = programs.program(**ADAM), "replicas=3"
    whole = on_ray(program, strategy, steps=9, checkpoint=tmp_path / "whole")
    on_ray(program, strategy, steps=5, checkpoint=tmp_path / "parts", checkpoint_every="2 steps")
    resumed = on_ray(program, strategy, steps=9, checkpoint=tmp_path / "parts", resume=True)
    assert tensors(newest_in(tmp_path / "parts")) == tensors(newest_in(tmp_path / "whole"))
    oracle.assert_same(resumed.model, whole.state, 0)
    for count in ("updates", "gradients", "applied", "staleness", "steps"):
        assert resumed.summary[count] == whole.summary[count], count
    notes = resumed.summary["notes"]
    assert notes["resumed"].startswith("went on from update 5 of ")
    assert (notes["checkpoint_failures"], notes["checkpoints"]) == (0, 1)


def test_deltas_that_the_policy_held_are_held_again(on_ray: OnRay, watched: list[Watcher], tmp_path: Path) -> None:
    """Two of three Δs are applied together, and the third waits when Ctrl-C comes."""
    program, strategy = programs.program(**ADAM), "replicas=1 aggregation=buffered:k=2,hold=false"
    over = tmp_path / "over"

    def loop(worker: Any) -> None:
        never = threading.Event()
        for made, batch in enumerate(worker.batches()):
            while made == 3 and not over.exists():
                never.wait(0.02)
            worker.step(batch)

    def watch(progress: Progress) -> None:
        if progress.phase == "training" and progress.gradients == 3 and not over.exists():
            over.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    whole = on_ray(program, strategy, steps=8)
    watched.append(watch)
    cut = on_ray(program, strategy, steps=ENDLESS, loop=loop, checkpoint=tmp_path / "ckpt")
    assert cut.summary["interrupted"]
    resumed = on_ray(program, strategy, steps=8, checkpoint=tmp_path / "ckpt", resume=True)
    oracle.assert_same(resumed.model, whole.state, 0)
    assert (resumed.summary["applied"], resumed.summary["discarded"]) == (8, 0)


@pytest.mark.parametrize("strategy", ["replicas=3", "replicas=1", "replicas=3 aggregation=asynchronous"])
def test_it_goes_on_with_what_the_local_engine_has_saved(
    on_ray: OnRay, local_engine: LocalEngine, strategy: str, tmp_path: Path
) -> None:
    program, folder = programs.program(**ADAM), tmp_path / "ckpt"
    settings = {"engine": local_engine, "progress": False, "evaluate_every": 10**6}
    saved = train(program, "replicas=2", steps=6, checkpoint=folder, **settings)
    same = on_ray(program, strategy, steps=6, checkpoint=folder, resume=True)
    assert same.summary["updates"] == 6
    oracle.assert_same(same.model, saved.state, 0)
    further = on_ray(program, strategy, steps=9, checkpoint=folder, resume=True)
    assert further.summary["updates"] > 6
    assert further.summary["gradients"] == further.summary["applied"] + further.summary["discarded"]
    assert [record.updates for record in further.history] == sorted(record.updates for record in further.history)


def test_and_the_local_engine_with_what_it_has_saved(on_ray: OnRay, local_engine: LocalEngine, tmp_path: Path) -> None:
    program, settings = programs.program(**ADAM), {"engine": local_engine, "progress": False}
    on_ray(program, "replicas=2", steps=4, checkpoint=tmp_path)
    resumed = train(program, "replicas=2", steps=8, checkpoint=tmp_path, resume=True, **settings)
    whole = train(program, "replicas=2", steps=8, **settings)
    oracle.assert_same(resumed.model, whole.state, 0)


def test_a_run_whose_server_has_died_is_resumed(
    on_ray: OnRay, engine: RayEngine, watched: list[Watcher], tmp_path: Path
) -> None:
    killed = threading.Event()

    def watch(progress: Progress) -> None:
        if (tmp_path / "ckpt").exists() and [*(tmp_path / "ckpt").glob("step-*")] and not killed.is_set():
            assert engine._pool is not None
            killed.set()
            os.kill(engine._pool.locations[engine._pool.server].pid, signal.SIGKILL)

    watched.append(watch)
    settings: dict[str, Any] = {"checkpoint": tmp_path / "ckpt", "checkpoint_every": "20 steps"}
    with pytest.raises(WorkerError, match="the server died, and A with it"):
        on_ray(programs.program(), "replicas=2", steps=ENDLESS, **settings)
    steps = newest_in(tmp_path / "ckpt").manifest.head["version"] + 3
    run = on_ray(programs.program(), "replicas=2", steps=steps, resume=True, **settings)
    assert run.summary["updates"] == steps


def test_a_run_that_a_replica_has_ended_is_saved(on_ray: OnRay, tmp_path: Path) -> None:
    def loop(worker: Any) -> None:
        for k, batch in enumerate(worker.batches()):
            worker.step(batch)
            if k == 3:
                raise KeyError("no such thing")

    with pytest.raises(WorkerError, match="KeyError: 'no such thing'"):
        on_ray(programs.program(), "replicas=1", steps=ENDLESS, loop=loop, checkpoint=tmp_path)
    assert newest_in(tmp_path).folder.name == "step-4"
    run = on_ray(programs.program(), "replicas=1", steps=6, checkpoint=tmp_path, resume=True)
    assert run.summary["updates"] == 6


def test_a_folder_that_can_not_be_written_costs_a_sentence(
    on_ray: OnRay, watched: list[Watcher], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watched.append(lambda _: (tmp_path / "ckpt").touch())
    run = on_ray(programs.program(), "replicas=1", steps=4, checkpoint=tmp_path / "ckpt")
    assert (run.summary["updates"], run.summary["notes"]["checkpoint_failures"]) == (4, 1)
    assert capfd.readouterr().err.count("paceline: the checkpoint at update 4 failed: ") == 1


def test_ctrl_c_before_training_saves_nothing(on_ray: OnRay, watched: list[Watcher], tmp_path: Path) -> None:
    signalled = threading.Event()

    def watch(progress: Progress) -> None:
        if not signalled.is_set():
            signalled.set()
            os.kill(os.getpid(), signal.SIGTERM)

    watched.append(watch)
    run = on_ray(programs.program(), "replicas=2", steps=ENDLESS, checkpoint=tmp_path)
    assert run.summary["interrupted"]
    assert newest(tmp_path) == (None, [])
    assert on_ray(programs.program(), "replicas=2", steps=3, checkpoint=tmp_path, resume=True).summary["updates"] == 3


@pytest.mark.parametrize("moment", ["training", "starting"])
def test_sigterm_ends_a_program_with_its_result(moment: str, short: Path, tmp_path: Path) -> None:
    folder, pidfds = tmp_path / "ckpt", list[int]()
    awaited = (lambda: [*folder.glob("step-*")]) if moment == "training" else (lambda: [*short.glob("ray-*/session_*")])
    with started(SAVED, short, str(folder)) as process:
        try:
            eventually(lambda: awaited() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            pidfds = [liveness.open_pid(child.pid) for child in psutil.Process(process.pid).children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    said = json.loads(out)
    assert said["interrupted"]
    if moment == "training":
        assert newest_in(folder).manifest.head["version"] == said["updates"] > 0
    else:
        assert (said["updates"], newest(folder)) == (0, (None, []))
    assert "SIGTERM" not in err
    assert liveness.wait_gone(pidfds, PATIENCE_S)
    eventually(lambda: not list(short.glob("ray-*")))
    for pidfd in pidfds:
        os.close(pidfd)


@pytest.mark.parametrize(("words", "code"), [(("--preemptible",), 0), ((), 143)])
def test_sigterm_ends_the_command_with_all_of_it_saved(
    words: tuple[str, ...], code: int, short: Path, tmp_path: Path
) -> None:
    folder, program = tmp_path / "ckpt", tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = ["train", f"{program}:program", "--strategy", "replicas=1 standby=1", "--engine", "ray", "--json"]
    saving = ["--steps", str(10**9), "--checkpoint", str(folder), "--checkpoint-every", "20 steps"]
    with started("from paceline.cli.main import main; main()", short, *command, *saving, *words) as process:
        try:
            eventually(lambda: [*folder.glob("step-*")] or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == code, err
    summary = json.loads(out)["summary"]
    assert newest_in(folder).manifest.head["version"] == summary["updates"] > 0
    assert summary["signal"] == "SIGTERM"
    assert "Traceback" not in err
    eventually(lambda: not list(short.glob("ray-*")))
