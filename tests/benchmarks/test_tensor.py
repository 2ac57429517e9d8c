"""The benchmark of operators divided among shards: its whole way from a measurement to the page."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tensor"

TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # several processes each import torch, on however few cores there are


def test_steps_are_measured_once_and_told_on_the_page(load: Callable[[str], Any], tmp_path: Path) -> None:
    words = ["--rows", "tiny", "--backends", "shm", "--pairs", "2", "--turn", "0.001", "--out", str(tmp_path)]
    command = [sys.executable, str(FOLDER / "measure.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    sheet = tmp_path / "results" / "steps.csv"
    with sheet.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["side"] for row in rows) == ["DTensor", "nothing sent", "one process", "paceline"]
    assert all(float(row["difference"]) <= 1e-4 for row in rows)
    assert all(float(row["step_ms"]) > 0 < float(row["forward_ms"]) for row in rows)
    before = sheet.read_text(encoding="utf-8")
    assert load("measure").main(words) == 0
    assert sheet.read_text(encoding="utf-8") == before  # nothing was measured again
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| tiny | 4 × 8 | shm | paceline |" in text


def test_the_page_says_what_is_not_as_it_is_to_be(load: Callable[[str], Any]) -> None:
    def row(name: str, side: str, of_one: str, of_dtensor: str) -> dict[str, str]:
        cell = {"row": name, "shards": "2", "backend": "shm", "side": side, "pairs": "9", "difference": "0.0"}
        times = {"step_ms": "3.0", "forward_ms": "1.0", "forward_of_one": "0.9", "forward_of_dtensor": "0.5"}
        machine = {
            "processor": "A",
            "cores": "2",
            "system": "Linux 6",
            "torch": "2",
            "python": "3",
            "date": "2026-01-01",
        }
        return cell | times | machine | {"of_one": of_one, "of_dtensor": of_dtensor}

    rows = [row("mlp 256", "paceline", "0.700", "0.300"), row("mlp 1024", "paceline", "0.550", "1.100")]
    text = load("page").page(rows)
    expected = """\
- mlp 256: 0.700 of one process (missed)
- mlp 256: 0.300 of DTensor
- mlp 1024: 0.550 of one process
- mlp 1024: 1.100 of DTensor (missed)
"""
    assert f"\n\n{expected}" in text
