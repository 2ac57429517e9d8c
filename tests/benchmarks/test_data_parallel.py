"""The benchmark of synchronous steps: its checks, and its whole way from a measurement to the page."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "data_parallel"

TIMEOUT_S = 100.0

CELL = ("--ranks", "2", "--models", "cnn", "--batches", "4", "--pairs", "1", "--turn", "0.001")

SIDES = ("alone", "ddp gloo", "paceline", "paceline shm, divided")

MACHINE = {
    "processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01",
}  # fmt: skip


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "measure.py"), "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


def rows(out: Path, name: str) -> list[dict[str, str]]:
    with (out / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_steps_are_measured_once_and_told_on_the_page(load: Callable[[str], Any], tmp_path: Path) -> None:
    done = run(tmp_path, *CELL, "--sides", *SIDES)
    assert done.returncode == 0, done.stderr
    steps = {row["side"]: row for row in rows(tmp_path, "data_parallel")}
    assert set(steps) == set(SIDES)
    assert steps["ddp gloo"]["ratio"] == "1.000"
    # 21,840 float32 go and come once between two ranks; Paceline sends its losses and counts with them.
    assert int(steps["ddp gloo"]["payload_bytes"]) == 2 * 21_840 * 4
    assert 0 <= int(steps["paceline"]["payload_bytes"]) - 2 * 21_840 * 4 < 1024
    assert all(float(row["difference"]) <= 1e-5 for side, row in steps.items() if side != "alone")
    assert load("measure").main([*CELL, "--sides", *SIDES, "--out", str(tmp_path)]) == 0
    assert {row["side"]: row for row in rows(tmp_path, "data_parallel")} == steps  # nothing was measured again
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    told = [line.split("|")[3].strip() for line in text.splitlines() if line.startswith("| 4 | 2 |")]
    assert told == list(SIDES)


def test_memory_is_measured_in_new_processes(tmp_path: Path) -> None:
    done = run(tmp_path, "--memory", *CELL, "--sides", "alone")
    assert done.returncode == 0, done.stderr
    (peak,) = rows(tmp_path, "memory")
    assert peak["side"] == "alone"
    assert float(peak["peak_mib"]) > 50  # torch by itself is more


def test_a_divided_optimizer_stands_beside_a_whole_one(tmp_path: Path) -> None:
    done = run(tmp_path, "--divided", "--ranks", "2", "--elements", "10000", "--pairs", "1", "--turn", "0.001")
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path, "divided")
    assert {(row["elements"], row["optimizer"], row["backend"]) for row in found} == {
        ("10000", optimizer, backend) for optimizer in ("sgd", "adam") for backend in ("shm", "gloo")
    }
    assert all(float(row["difference"]) <= 1e-5 for row in found)


def test_a_side_that_does_less_is_refused(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, sides = load("ranks"), load("sides")
    monkeypatch.setattr(ranks, "_largest", lambda value: value)
    done = {side: sides.Turn([1.0], {"weight": torch.full((2,), 0.5)}) for side in ("ddp gloo", "other", "alone")}
    less = done | {"other": sides.Turn([1.0], {"weight": torch.tensor([0.5, 0.50002])})}
    alone = done | {"alone": less["other"]}
    assert ranks._differences(alone, "ddp gloo") == {"ddp gloo": 0.0, "other": 0.0}
    with pytest.raises(ArithmeticError, match=r"other ended 2.*e-05 from ddp gloo"):
        ranks._differences(less, "ddp gloo")


def test_the_page_lists_where_the_default_is_slower(load: Callable[[str], Any]) -> None:
    def row(model: str, ranks: int, side: str, ratio: float) -> dict[str, str]:
        cell = {"model": model, "parameters": "10", "ranks": str(ranks), "batch": "32", "side": side}
        figures = {"step_ms": "1.0", "ratio": str(ratio), "payload_bytes": "0", "payload_by": "", "pairs": "9"}
        return cell | figures | {"version": "accelerate 9" if side == "accelerate gloo" else ""} | MACHINE

    steps = [row("mlp", 2, "paceline", 0.75), row("cnn", 4, "paceline", 1.01), row("cnn", 4, "accelerate gloo", 1.2)]
    peaks = [steps[0] | {"peak_mib": "123.4"}]
    text = load("page").page([*steps, row("mlp", 1, "paceline", 0.99)], peaks, [])
    assert "slower than DDP on Gloo: 1 of 3 rows\n\n- cnn, batch 32, 4 ranks: 1.010\n" in text
    assert "is the aim\n\n- mlp, batch 32, 2 ranks: 0.75 (missed)\n" in text
    assert "Beside: accelerate 9." in text
    assert "| 32 | 2 | paceline | 1.00 | 0.75 | 0 |  | 123.4 |" in text


def test_a_side_that_is_not_installed_is_left_out(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(load("sides").OPTIONAL, "fabric gloo", ("no_such_module", "lightning-fabric"))
    assert load("measure").present(["ddp gloo", "fabric gloo"]) == ["ddp gloo"]
    assert "fabric gloo is left out: lightning-fabric is not installed" in capsys.readouterr().err
