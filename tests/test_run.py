"""Runs on disk: what is written is what is read, whole or not at all."""

import csv
import json
import math
import os
import random
import signal
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import paceline.run
from paceline.aggregation import SmoothSwitch
from paceline.checkpoint.manifest import Manifest
from paceline.core.errors import InputError
from paceline.core.records import RECORD_FIELDS, Record, ReplicaExit
from paceline.core.registry import family_of, register
from paceline.core.safe_files import check_out, new_folder, reserved
from paceline.program import Program
from paceline.run import Run, load, load_state, save_state
from paceline.schedule.gpipe import GPipe
from paceline.strategy import Strategy
from paceline.trace.spans import Span

FILES = ["history.csv", "manifest.json", "model.safetensors", "spans.jsonl", "strategy.toml", "summary.json"]
STRATEGY = Strategy.parse("replicas=4 aggregation=smooth-switch:every=300")
HISTORY = [
    Record(0.0, 0, 0, 1, None, 2.3, 2.4, 0.1, {"f1": 0.05}),
    Record(1 / 3, 7, 11, 2, 0.1 + 0.2, 1e-300, None, 2 / 3, {"f1": 1.0}),
]
SPANS = [Span(0, 0, 0, "forward", 1, 0, 0, 10, 0), Span(-1, 0, 0, "apply", 1, 0, 12, 15, 4)]
SUMMARY = {"updates": 7, "samples_per_s": 0.1 + 0.2, "staleness": {"0": 3}, "test_loss": None, "interrupted": False}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 4, bias=False)
        self.write = nn.Linear(3, 4)
        self.write.weight = self.read.weight
        self.norm = nn.BatchNorm1d(4)


def program(model: Callable[[], nn.Module] = Tied) -> Program:
    data = torch.zeros(2, 3), torch.zeros(2, 4)
    return Program(model, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), data)


def make_run(**changes: Any) -> Run:
    model = program().build()
    left = [ReplicaExit(2, "killed by SIGKILL", 0.25)]
    run = Run("digits", STRATEGY, "local", model.state_dict(), dict(SUMMARY), HISTORY, left, SPANS, model)
    return replace(run, **changes)


def same_state(ours: Any, theirs: Any) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------------------------------- there and back


def test_a_saved_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run = make_run()
    run.save(tmp_path / "deep" / "a")
    back = load(tmp_path / "deep" / "a")
    assert same_state(back.state, run.state)
    assert replace(back, state={}) == replace(run, state={}, model=None)


def test_a_saved_run_is_six_plain_files_and_nothing_beside(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == FILES
    assert os.listdir(tmp_path) == ["a"]


def test_others_can_read_the_files(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    told = tomllib.loads((tmp_path / "a" / "strategy.toml").read_text())
    assert (told["program"], told["engine"], told["strategy"]) == ("digits", "local", str(STRATEGY))
    assert (told["replicas"], told["aggregation"]) == (4, "smooth-switch:every=300")
    with (tmp_path / "a" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*RECORD_FIELDS, "test_f1"]
    assert (rows[0]["staleness_mean"], rows[1]["test_loss"]) == ("", "")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert list(summary) == [*SUMMARY, "left"]
    assert summary["left"] == [{"replica": 2, "reason": "killed by SIGKILL", "time_s": 0.25}]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_history_comes_back(tmp_path: Path, value: float) -> None:
    make_run(history=[replace(HISTORY[0], test_loss=value)]).save(tmp_path / "a")
    found = load(tmp_path / "a").history[0].test_loss
    assert found is not None
    assert repr(found) == repr(value)
    assert load(tmp_path / "a").to_json()["history"][0]["test_loss"] is None


def test_an_untraced_run_without_history_comes_back(tmp_path: Path) -> None:
    make_run(history=[], spans=[], left=[]).save(tmp_path / "a")
    back = load(tmp_path / "a")
    assert (back.history, back.spans, back.left) == ([], [], [])


@pytest.mark.parametrize("name", ['say "hi"\\', "tab\tand\nline", "del\x7f", "数字", ""])
def test_any_program_name_comes_back(tmp_path: Path, name: str) -> None:
    make_run(program_name=name).save(tmp_path / "a")
    assert load(tmp_path / "a").program_name == name


def test_a_policy_that_only_its_program_knows_is_kept_as_text(tmp_path: Path) -> None:
    def grows(u: int) -> float:
        return 1 + u / 7

    run = make_run(strategy=Strategy(replicas=3, aggregation=SmoothSwitch(threshold=grows)))
    run.save(tmp_path / "a")
    back = load(tmp_path / "a")
    assert back.strategy == str(run.strategy)
    assert "grows" in back.strategy
    back.save(tmp_path / "b")
    assert load(tmp_path / "b").to_json() == run.to_json()


def test_a_schedule_that_only_its_program_knows_is_kept_as_text(tmp_path: Path) -> None:
    @register("of-the-program")
    @dataclass(frozen=True)
    class OfTheProgram(GPipe):
        pass

    run, family = make_run(strategy=Strategy(stages=2, schedule="of-the-program")), family_of(GPipe)
    assert family is not None
    del family.entries["of-the-program"]
    run.save(tmp_path / "a")
    assert load(tmp_path / "a").strategy == "replicas=1 stages=2 schedule=of-the-program"


def test_json_has_exactly_the_keys_of_the_command_line() -> None:
    found = make_run().to_json()
    assert list(found) == ["strategy", "engine", "summary", "history", "left"]
    assert (found["strategy"], found["engine"], found["summary"]) == (str(STRATEGY), "local", SUMMARY)
    assert list(found["history"][0]) == [*RECORD_FIELDS, "test_f1"]
    json.dumps(found, allow_nan=False)


# ------------------------------------------------------------------------------------------------------------ the model


def test_with_its_program_a_run_has_its_model_with_its_ties(tmp_path: Path) -> None:
    run = make_run()
    with torch.no_grad():
        next(iter(run.state.values())).add_(1.0)
    run.save(tmp_path / "a")
    model = load(tmp_path / "a", program()).model
    assert isinstance(model, Tied)
    assert model.write.weight is model.read.weight
    assert same_state(model.state_dict(), run.state)


def test_a_model_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    with pytest.raises(InputError, match=r"model\.safetensors does not fit .*Linear:\s.*Missing"):
        load(tmp_path / "a", program(lambda: nn.Linear(3, 4)))


def test_ties_share_memory_again_and_are_written_once(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    save_state({"a": whole, "b": whole, "part": whole[:10], "empty": torch.empty(0)}, tmp_path / "s")
    back = load_state(tmp_path / "s")
    assert back["a"] is back["b"]
    assert torch.equal(back["part"], torch.arange(10.0))
    assert back["empty"].shape == (0,)
    assert (tmp_path / "s").stat().st_size < 2 * 4000


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True]),
        torch.ones(2).bfloat16(),
    ],
)
def test_tensors_of_any_layout_and_kind_come_back(tmp_path: Path, tensor: Tensor) -> None:
    save_state({"x": tensor, "views": tensor.view(tensor.shape)[..., :1] if tensor.dim() else tensor}, tmp_path / "s")
    found = load_state(tmp_path / "s")["x"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


# -------------------------------------------------------------------------------------------------- whole or not at all


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="exists"):
        make_run().save(tmp_path / "a")
    assert os.listdir(tmp_path / "a") == []


@pytest.mark.parametrize("failing", ["write_json", "save_state", "write_spans"])
def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(paceline.run, failing, fail)
    with pytest.raises(InputError, match=r"a can't be written: no space left"):
        make_run().save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_until_it_is_whole_a_folder_is_hidden_under_another_name(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        assert not (tmp_path / "a").exists()
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
    assert (tmp_path / "a" / "half").read_text() == "x"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"), new_folder(tmp_path / "a"):
        (tmp_path / "a").mkdir()
    assert os.listdir(tmp_path) == ["a"]


def test_an_out_folder_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for bad in ("file", "file/below", "dangling"):
        with pytest.raises(InputError, match=bad.split("/")[0]):
            check_out(tmp_path / bad)
    assert check_out(tmp_path / "new" / "deep") == tmp_path / "new" / "deep"
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]


def test_a_place_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by chmod: the superuser may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))
    with pytest.raises(InputError, match="not writable"):
        check_out(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("", "'' names no folder; write the path of a new one, 'runs/a'"),
        (3, "3 names no folder"),
        (".", "exists, and nothing is overwritten; write another folder, ./a for instance"),
        ("/proc/a", "/proc/a can't be made: "),
    ],
)
def test_what_can_be_no_new_folder(path: Any, match: str) -> None:
    with pytest.raises(InputError, match=match), reserved(path):
        pass


def test_a_folder_is_reserved_by_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.core.safe_files.LOCK_WAIT_S", 0.0)
    with reserved(tmp_path / "runs" / "a") as folder:
        match = "another run that has not ended is to be saved in .*a-2 for instance"
        with pytest.raises(InputError, match=match), reserved(folder):
            pass
        with new_folder(folder):  # by the run itself
            pass
    assert os.listdir(tmp_path / "runs") == ["a"]
    with reserved(tmp_path / "other" / "b"):
        pass
    assert os.listdir(tmp_path) == ["runs"]


def test_what_a_killed_run_had_reserved_is_free(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        with reserved(tmp_path / "a"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(tmp_path) == []
    with reserved(tmp_path / "a") as folder, new_folder(folder):
        pass
    assert os.listdir(tmp_path) == ["a"]


# -------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_run().save(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    with pytest.raises(InputError, match=name):
        load(tmp_path / "a")


def seal(folder: Path) -> None:
    """Write the manifest that fits the files as they are now, so that only their contents can be wrong."""
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(Manifest.of_files({}, folder).to_json())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe{", b"[1]", b"{}\n{}"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: bytes, sealed: bool) -> None:
    make_run().save(tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(damage)
    if sealed and name != "manifest.json":
        seal(tmp_path / "a")
        if (name, damage) == ("spans.jsonl", b""):
            assert load(tmp_path / "a").spans == []  # nothing was traced, as far as can be told
            return
    with pytest.raises(InputError, match=name):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("history.csv", "updates", "upgrades"),
        ("history.csv", ",11,", ",eleven,"),
        ("history.csv", ",11,", ",11,12,"),
        ("history.csv", ",7,11,2,", ",7,"),
        ("history.csv", ",7,11,2,", ',7,11,2,"'),
        ("history.csv", ",7,11,2,", f",7,11,{'2' * 200_000},"),
        ("summary.json", '"replica": 2', '"replicant": 2'),
        ("summary.json", '"left"', '"right"'),
        ("summary.json", '"left": [', '"left": ["x", '),
        ("summary.json", '"updates": 7', f'"updates": {"[" * 200_000}'),
        ("summary.json", '"updates": 7', '"updates": 7, "updates": 8'),
        ("summary.json", '"updates": 7', f'"updates": [{"[]," * 500_000}[]]'),
        ("spans.jsonl", '"step":1', f'"step":{"[" * 200_000}'),
        ("strategy.toml", 'engine = "local"', ""),
        ("strategy.toml", 'engine = "local"', f"engine = {'[' * 50_000}"),
        ("strategy.toml", 'engine = "local"', f'engine = "{" " * 200_000}"'),
        ("strategy.toml", '"replicas=4 ', '"replicas=0 '),
    ],
)
def test_a_file_with_a_wrong_word_is_named(tmp_path: Path, name: str, old: str, new: str) -> None:
    make_run().save(tmp_path / "a")
    file = tmp_path / "a" / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=name):
        load(tmp_path / "a")
    seal(tmp_path / "a")
    with pytest.raises(InputError, match=name):
        load(tmp_path / "a")


@pytest.mark.parametrize("tied", ["[1]", "7", '"read.weight"', '{"a": "nothing"}', "[" * 200_000])
def test_wrong_ties_are_refused(tmp_path: Path, tied: str) -> None:
    make_run().save(tmp_path / "a")
    save_file({"read.weight": torch.zeros(4, 3)}, tmp_path / "a" / "model.safetensors", metadata={"tied": tied})
    seal(tmp_path / "a")
    with pytest.raises(InputError, match=r"model\.safetensors can't be read"):
        load(tmp_path / "a")


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    make_run().save(tmp_path / "a")
    file = tmp_path / "a" / name
    for replace_it in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), file.mkdir):
        file.unlink()
        replace_it()
        with pytest.raises(InputError, match=rf"{name} can't be read: it is no regular file"):
            load(tmp_path / "a")
        if file.is_dir():
            file.rmdir()
            file.touch()


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, seed: int) -> None:
    make_run().save(tmp_path / "a")
    chance = random.Random(seed)
    file = tmp_path / "a" / chance.choice(FILES)
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    with pytest.raises(InputError, match=file.name):
        load(tmp_path / "a")


def test_the_model_of_another_run_is_noticed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(model=None, state={"w": torch.full((3,), float(ord(name)))}).save(tmp_path / name)
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=r"a/model\.safetensors can't be read: its SHA-256"):
        load(tmp_path / "a")


def test_a_run_saved_without_a_manifest_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json is missing.*save the run again"):
        load(tmp_path / "a")


def test_files_that_others_add_do_not_matter(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    (tmp_path / "a" / "report.html").write_text("<p>")
    assert load(tmp_path / "a").summary == SUMMARY


def test_a_truncated_model_is_named(tmp_path: Path) -> None:
    make_run().save(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load(tmp_path / "a")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        load(tmp_path / "nowhere")


# --------------------------------------------------------------------------------------------------------------- extras


def test_the_history_as_a_table() -> None:
    pytest.importorskip("pandas")
    frame = make_run().history_frame()
    assert list(frame.columns) == [*RECORD_FIELDS, "test_f1"]
    assert frame["updates"].tolist() == [0, 7]
    assert math.isnan(frame["test_loss"][1])


def absent(package: str) -> Callable[[str], Any]:
    return lambda name: None if name == package else find_spec(name)


def test_without_pandas_the_line_to_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.run, "find_spec", absent("pandas"))
    with pytest.raises(InputError, match=r"pip install 'paceline\[pandas\]'"):
        make_run().history_frame()


def test_without_tensorboard_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.run, "find_spec", absent("tensorboard"))
    with pytest.raises(InputError, match=r"pip install 'paceline\[tensorboard\]'"):
        make_run().save(tmp_path / "a", tensorboard=True)
    assert os.listdir(tmp_path) == []


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_run().save(tmp_path / "a", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "a")).Reload()
    assert set(events.Tags()["scalars"]) == {*RECORD_FIELDS, "test_f1"}
    assert [(e.step, e.value) for e in events.Scalars("test_accuracy")] == [
        (0, pytest.approx(0.1)),
        (7, pytest.approx(2 / 3)),
    ]
    assert load(tmp_path / "a").history == HISTORY
