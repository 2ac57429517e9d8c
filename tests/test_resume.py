"""Runs that go on from a checkpoint: as they were, as something else, from an earlier one, and what is refused."""

import functools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Arrival, Decision, InputError, Run, Strategy, load, resume, train
from paceline.aggregation.base import Unsynchronized, combined, released
from paceline.api.train import train_with
from paceline.callbacks import Callback
from paceline.checkpoint.manifest import MANIFEST, Manifest, checkpoint_folders
from paceline.engine.checkpointing import Checkpointer
from tests.engine import programs

QUIET: dict[str, Any] = {"progress": False}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training wait for each checkpoint, so that none is left out while the one before is still being written."""
    save = Checkpointer.save

    def saved(checkpointer: Checkpointer, *args: Any) -> None:
        save(checkpointer, *args)
        checkpointer._wait(time.monotonic() + 60)

    monkeypatch.setattr(Checkpointer, "save", saved)


def begun(folder: Path, steps: int = 6, **options: Any) -> Run:
    return train(
        programs.program(),
        "replicas=2 aggregation=smooth-switch:every=3",
        engine="virtual",
        **{"steps": steps, "checkpoint": folder, "checkpoint_every": "2 steps"} | options | QUIET,
    )


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


def test_a_run_goes_on_as_it_was(tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole", steps=12)
    begun(tmp_path / "cut", steps=6)
    run = resume(tmp_path / "cut", programs.program(), steps=12, **QUIET)
    assert same(run, whole)
    assert (run.engine, str(run.strategy)) == ("virtual", str(whole.strategy))
    assert [r.updates for r in run.history if r.time_s == 0] == [0], "its history is that from the beginning"
    assert run.summary["notes"]["checkpoints"] >= 3, "it is saved as often as before"


def test_it_ends_at_once_where_the_budget_is_spent(tmp_path: Path) -> None:
    run = begun(tmp_path)
    again = resume(tmp_path, programs.program(), **QUIET)
    assert same(run, again)
    assert again.summary["updates"] == run.summary["updates"]


@pytest.mark.parametrize("strategy", ["replicas=3", "replicas=1 accumulate=2", "replicas=4 aggregation=asynchronous"])
def test_or_under_another_strategy(tmp_path: Path, strategy: str) -> None:
    before = begun(tmp_path).summary["gradients"]
    run = resume(tmp_path, programs.program(), strategy, steps=9, **QUIET)
    assert str(run.strategy).startswith(strategy)
    assert run.summary["gradients"] > before


def test_delays_are_those_of_the_run(tmp_path: Path) -> None:
    """And so are the order of arrivals, and the bits, under a policy that waits for none."""
    options: dict[str, Any] = {"delay": "fraction=0.5 normal:mean=0,std=0.02", "checkpoint_every": "2 steps"}
    options |= {"engine": "virtual", "steps": 9, "keep": 9} | QUIET
    strategy = "replicas=3 aggregation=asynchronous"
    whole = train(programs.program(), strategy, checkpoint=tmp_path / "a", **options)
    first = min((tmp_path / "a").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    run = resume(first, programs.program(), **QUIET)
    assert same(run, whole)
    assert run.summary["seconds"] == whole.summary["seconds"]
    other = resume(first, programs.program(), delay=None, **QUIET)
    assert other.summary["seconds"] != whole.summary["seconds"]


def test_other_options_are_those_of_the_run_as_far_as_the_strategy_takes_them(tmp_path: Path) -> None:
    begun(tmp_path, noise_scale=True, trace=True, times="compute=1", callbacks=[Callback()], timeout_s=33.0)
    head = Manifest.read(checkpoint_folders(tmp_path)[0]).head
    assert head["options"]["timeout_s"] == 33.0
    run = resume(tmp_path, programs.program(), steps=8, checkpoint=tmp_path / "b", **QUIET)
    assert run.summary["noise_scale"] is not None
    assert run.spans
    assert run.summary["seconds"] >= 8
    assert run.summary["notes"]["resumed"].endswith(", without callbacks= of the run before")
    again = {"callbacks": [Callback()], "checkpoint": tmp_path / "c"}
    other = resume(tmp_path, programs.program(), "replicas=2 aggregation=local-steps", steps=8, **again, **QUIET)
    assert "noise_scale" not in other.summary
    assert other.spans
    assert other.summary["notes"]["resumed"].endswith(", without noise_scale= of the run before")


@dataclass(frozen=True)
class Listed(Unsynchronized[Any]):
    """Its state is one that no checkpoint can hold."""

    def start(self, replicas: int) -> Any:
        return [replicas]

    def arrived(self, state: Any, arrival: Arrival) -> tuple[Any, Decision]:
        return state, (*combined((arrival,), "mean"), *released((arrival.replica,)))


def test_a_state_that_cannot_be_saved_is_refused_before_anything_starts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "virtual", "steps": 2} | QUIET
    with pytest.raises(InputError, match="state has a list, which a checkpoint can't hold"):
        train(programs.program(), Strategy(aggregation=Listed()), checkpoint=tmp_path / "ckpt", **options)
    assert not (tmp_path / "ckpt").exists()


def test_an_earlier_checkpoint_says_no_options(tmp_path: Path) -> None:
    begun(tmp_path, trace=True)
    folder = checkpoint_folders(tmp_path)[0]
    manifest = Manifest.read(folder)
    del manifest.head["options"], manifest.head["other_options"]
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    run = resume(folder, programs.program(), steps=8, **QUIET)
    assert run.summary["steps"] == 8
    assert not run.spans


def test_one_can_go_back_and_save_elsewhere(tmp_path: Path) -> None:
    run = begun(tmp_path / "a", keep=9)
    folders = sorted((tmp_path / "a").iterdir(), key=lambda folder: int(folder.name[5:]))
    assert len(folders) > 2
    again = resume(folders[0], programs.program(), steps=6, checkpoint=tmp_path / "b", **QUIET)
    assert same(run, again)
    assert (tmp_path / "b" / folders[-1].name).is_dir()
    assert resume(folders[1], programs.program(), steps=6, **QUIET).summary["notes"].get("checkpoints") is None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"optimizer": functools.partial(torch.optim.SGD, lr=0.3)}, "lr of the optimizer is 0.1 in the checkpoint"),
        ({"model": programs.wide}, "0.weight is float64 [8, 6] in the checkpoint, but float64 [64, 6] in this program"),
        ({"train": programs.data(samples=40)}, "training set is 50 samples"),
        ({"batch_size": 5}, "batch size is 4 per replica in the checkpoint, but 5 per replica in this program"),
    ],
)
def test_another_program_is_refused(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    begun(tmp_path)
    with pytest.raises(InputError) as refusal:
        resume(tmp_path, programs.program(**other), steps=9, **QUIET)
    assert named in str(refusal.value)
    assert "accept_changes=True" in str(refusal.value)


def test_unless_the_changes_are_accepted(tmp_path: Path) -> None:
    """The new rate counts from then on, not that of the checkpoint."""
    begun(tmp_path / "a")
    rate = functools.partial(torch.optim.SGD, lr=0.0)
    run = resume(tmp_path / "a", programs.program(optimizer=rate), steps=9, accept_changes=True, **QUIET)
    assert same(run, begun(tmp_path / "b"))


def test_a_shape_can_not_be_accepted(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(InputError, match=r"0\.weight has shape \[8, 6\]"):
        resume(tmp_path, programs.program(model=programs.wide), steps=9, accept_changes=True, **QUIET)


@pytest.mark.parametrize("name", ["none", "step-3"])
def test_a_folder_that_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"there is no folder {tmp_path / name}; write the folder that checkpoint="):
        resume(tmp_path / name, programs.program(), **QUIET)
    with pytest.raises(InputError, match=f"there is no folder {tmp_path / name}; write the folder that checkpoint="):
        train(programs.program(), engine="virtual", steps=1, resume=tmp_path / name, **QUIET)


@pytest.mark.parametrize("name", ["file", "run"])
def test_what_is_no_folder_of_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    train(programs.program(), engine="virtual", steps=1, out=tmp_path / "run", **QUIET)
    with pytest.raises(InputError, match=f"{name} has no sound checkpoint"):
        resume(tmp_path / name, programs.program(), **QUIET)


def test_a_damaged_one_is_refused_by_name_and_passed_over_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path)
    newest = max(tmp_path.iterdir(), key=lambda folder: int(folder.name[5:]))
    part = newest / "part-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match=part.name):
        resume(newest, programs.program(), steps=9, **QUIET)
    resume(tmp_path, programs.program(), steps=9, **QUIET)
    assert str(part) in capsys.readouterr().err


def test_what_out_could_not_save_is_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("paceline.run.write_spans", fill)
        run = train(programs.program(), engine="virtual", steps=2, out=tmp_path / "a", **QUIET)
    assert "No space left on device" in run.summary["not_saved"]
    assert "not saved" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    run.save(tmp_path / "b")
    assert same(load(tmp_path / "b"), run)


def test_it_is_looked_up_and_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path)
    monkeypatch.delattr("paceline.train_options.find")
    assert same(run, resume(tmp_path, programs.program(), **QUIET))


@pytest.mark.parametrize("becomes", ["gone", "damaged"])
@pytest.mark.parametrize("name", ["virtual", "local"])
def test_what_becomes_of_it_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str, engines: dict[str, Any], name: str
) -> None:
    """It is verified once more as it is read, by whoever reads it."""
    begun(tmp_path)
    newest = max(tmp_path.glob("step-*"), key=lambda folder: int(folder.name[5:]))
    part = newest / "part-0.safetensors"

    def meanwhile(*args: Any, **options: Any) -> Run:
        if becomes == "gone":
            shutil.rmtree(newest)
        else:
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        return train_with(*args, **options)

    monkeypatch.setattr("paceline.api.resume.train_with", meanwhile)
    with pytest.raises(InputError) as refusal:
        resume(tmp_path, programs.program(), engine=engines[name], steps=9, **QUIET)
    named = newest / "manifest.json" if becomes == "gone" else part
    assert str(named) in str(refusal.value)
    assert ("is missing" if becomes == "gone" else "its SHA-256 is not") in str(refusal.value)
