"""The benchmark of meshes: its whole way from a measurement to the page."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hybrid"

TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # several processes each import torch, on however few cores there are


def test_meshes_of_so_many_workers(load: Callable[[str], Any]) -> None:
    meshes = [tuple(mesh) for mesh in load("meshes").meshes(4)]
    assert meshes == [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]


def test_they_are_measured_once_and_told_on_the_page(load: Callable[[str], Any], tmp_path: Path) -> None:
    words = ["--workers", "2", "--rounds", "1", "--steps", "2", "--layers", "2", "--width", "8", "--out", str(tmp_path)]
    command = [sys.executable, str(FOLDER / "measure.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    sheet = tmp_path / "results" / "steps.csv"
    with sheet.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    whole = max(int(row["parameter_bytes"]) for row in rows)
    held = {(row["replicas"], row["stages"], row["shards"]): int(row["parameter_bytes"]) for row in rows}
    assert held["2", "1", "1"] == whole
    assert held["1", "2", "1"] < whole > held["1", "1", "2"]
    assert all(int(row["sent_bytes"]) > 0 < float(row["step_ms"]) for row in rows)
    before = sheet.read_text(encoding="utf-8")
    assert load("measure").main(words) == 0
    assert sheet.read_text(encoding="utf-8") == before  # nothing was measured again
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    assert "\n## 2 workers\n" in (tmp_path / "README.md").read_text(encoding="utf-8")
