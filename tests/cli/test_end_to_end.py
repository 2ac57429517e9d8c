"""The commands as users run them: real processes, the virtual engine, files on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--engine", "virtual", "--steps", "6", "--no-progress")
NOISY = """
import functools, os, torch
from paceline import Program

def model():
    print("a line from Python")
    os.write(1, b"a line past Python\\n")
    return torch.nn.Linear(4, 3)

inputs, targets = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
program = Program(model=model, loss=torch.nn.functional.cross_entropy, batch_size=4,
                  optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(inputs, targets), test=(inputs, targets))
"""


def paceline(*words: str | Path, hash_seed: str = "0", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "COLUMNS": "160"}
    command = [sys.executable, "-c", "from paceline.cli.main import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=folder)


def results(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_train_prints_what_the_design_promises() -> None:
    printed = results(paceline("train", "synthetic", *QUICK, "--strategy", "replicas=3", "--json"))
    assert list(printed) == ["strategy", "engine", "summary", "history", "left"]
    assert (printed["strategy"], printed["engine"], printed["left"]) == ("replicas=3", "virtual", [])
    assert printed["summary"]["gradients"] == 18
    assert set(printed["history"][-1]) >= {"time_s", "updates", "gradients", "threshold", "test_accuracy"}


def test_equal_seeds_give_equal_bytes_whatever_the_hash_seed() -> None:
    words = ("train", "synthetic", *QUICK, "--strategy", "replicas=4 aggregation=asynchronous", "--json", "--delay")
    first, second = (paceline(*words, "exponential:mean=0.02", hash_seed=seed) for seed in ("1", "2"))
    assert results(first)
    assert first.stdout == second.stdout


def test_times_and_plans_read_one_file_of_a_cluster(tmp_path: Path) -> None:
    links = "[links]\ninside_bytes_per_s = 1e9\nbetween_bytes_per_s = 1e8\nlatency_s = 0.5\n"
    device = "[device]\nflops_per_s = 1e12\nmemory_bytes = 4e9\nmemory_bytes_per_s = 1e11\n"
    absences = "[[absences]]\nhost = 1\nfrom_s = 2.0\nuntil_s = 4.0\n"
    (tmp_path / "cluster.toml").write_text(f"hosts = 2\n{device}{links}{absences}")
    (tmp_path / "shape.toml").write_text(
        "[model]\nlayers = 2\nhidden = 64\nheads = 2\nvocab = 100\nsequence = 16\n[train]\nglobal_batch = 8\n"
    )
    words = ("synthetic", *QUICK, "--strategy", "replicas=2 servers=1", "--times", "network=cluster.toml", "--json")
    printed = results(paceline("train", *words, folder=tmp_path))
    assert printed["summary"]["seconds"] > 6
    assert printed["left"] == [{"replica": 1, "reason": "host 1 went away", "time_s": 2.0}]
    planned = results(paceline("plan", "shape.toml", "--cluster", "cluster.toml", "--json", folder=tmp_path))
    assert planned["plans"]


def test_a_program_that_prints_leaves_the_json_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NOISY, encoding="utf-8")
    done = paceline("train", f"{tmp_path / 'mine.py'}:program", *QUICK, "--strategy", "replicas=2", "--json")
    assert results(done)["summary"]["gradients"] == 12
    assert "a line from Python" in done.stderr
    assert "a line past Python" in done.stderr


def test_a_traced_run_is_saved_drawn_and_reported(tmp_path: Path) -> None:
    run, svg, perfetto, page = (tmp_path / name for name in ("run", "lanes.svg", "lanes.json", "page.html"))
    done = paceline("train", "synthetic", *QUICK, "--strategy", "replicas=2", "--trace", "--out", run)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout

    text = paceline("trace", run)
    assert text.returncode == 0, text.stderr
    assert text.stdout.strip()
    drawn = results(paceline("trace", run, "--svg", svg, "--perfetto", perfetto, "--json"))
    assert drawn["spans"] > 0
    assert svg.read_text(encoding="utf-8").lstrip().startswith("<")
    assert json.loads(perfetto.read_text(encoding="utf-8"))
    assert results(paceline("report", run, "--html", page, "--json")) == {"html": str(page)}
    assert "<html" in page.read_text(encoding="utf-8").lower()


def test_compare_writes_its_folder_and_its_report(tmp_path: Path) -> None:
    out = tmp_path / "c"
    strategies = ("--strategy", "replicas=2", "--strategy", "replicas=2 aggregation=smooth-switch:every=4")
    done = paceline("compare", "synthetic", *QUICK, *strategies, "--rounds", "2", "--out", out, "--json")
    compared = results(done)
    assert [len(s["rounds"]) for s in compared["strategies"]] == [2, 2]
    assert {"strategies", "baseline", "difference"} <= set(compared)
    assert (out / "report.html").is_file()


def test_the_table_of_a_comparison_names_each_strategy() -> None:
    strategies = ("replicas=2", "replicas=2 aggregation=asynchronous")
    words = [word for s in strategies for word in ("--strategy", s)]
    done = paceline("compare", "synthetic", *QUICK, *words)
    assert done.returncode == 0, done.stderr
    named = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert {"synchronous", "asynchronous"} <= set(named)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--strategy", "replicas=2 aggregation=asynchronos"), "asynchronous"),
        (("--strategy", "replicas=0"), "replicas=0"),
        (("--engine", "virtuel"), "virtual"),
        (("--steps", "-1"), "steps"),
        (("--until", "accuracy>0"), "until"),
        (("--seconds", "5"), "seconds"),
    ],
)
def test_bad_input_is_refused_in_words(words: tuple[str, str], said: str) -> None:
    done = paceline("train", "synthetic", *QUICK, *words, "--json")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["digit", "nowhere.py:program", "json:dumps"])
def test_a_program_that_is_none_is_refused(name: str) -> None:
    done = paceline("train", name, *QUICK)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_an_output_folder_that_exists_is_refused(tmp_path: Path) -> None:
    done = paceline("train", "synthetic", *QUICK, "--out", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


def test_a_pipeline_is_trained_and_drawn_beside_its_ideal(tmp_path: Path) -> None:
    words = (
        "--steps",
        "4",
        "--strategy",
        "stages=2 micro_batches=4 cuts=2",
        "--trace",
        "--out",
        tmp_path / "run",
        "--json",
    )
    summary = results(paceline("train", "synthetic", *words))["summary"]
    assert summary["peak_saved_bytes"][0] > 0  # what ReLU keeps; stage 1 keeps what it is sent
    text = paceline("trace", tmp_path / "run", "--step", "3").stdout.splitlines()
    assert text[1].startswith("measured, step 3: ")
    assert text[4].startswith("ideal, 1f1b with 4 micro-batches: ")
    drawn = results(paceline("trace", tmp_path / "run", "--json"))["pipeline"]
    assert drawn["steps"] == 4
    assert drawn["step_time_s"] == pytest.approx(drawn["measured_over_ideal"] * drawn["ideal_step_time_s"])
    assert [stage["peak_saved_bytes"] for stage in drawn["stages"]] == summary["peak_saved_bytes"]


def test_the_cut_of_a_pipeline_is_shown_without_training() -> None:
    shown = results(paceline("train", "synthetic", "--strategy", "stages=2", "--show-stages", "--json"))
    assert shown["strategy"] == "stages=2"
    assert shown["table"].startswith("2 stages; slowest: ")
    assert len(shown["table"].splitlines()) == 5


def test_the_division_of_operators_is_shown_without_training() -> None:
    words = ("train", "synthetic", "--strategy", "shards=2", "--show-shards")
    shown = results(paceline(*words, "--json"))
    assert (shown["strategy"], shown["shards"], len(shown["parameters_by_shard"])) == ("shards=2", 2, 2)
    assert {"column", "row"} & {row["cut"] for row in shown["rows"]}
    assert paceline(*words).stdout.startswith("2 shards; bytes: ")
