"""The benchmark of meshes: its whole way from a measurement to the page."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hybrid"

pytestmark = pytest.mark.timeout(480.0)  # several processes each import torch, on however few cores there are

SMALL = ["--rounds", "1", "--layers", "2", "--width", "8"]

MACHINE = {"processor": "p", "cores": "2", "system": "s", "torch": "t", "python": "3", "date": "2026-11-22"}


def read(sheet: Path) -> list[dict[str, str]]:
    with sheet.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_meshes_of_so_many_workers(load: Callable[[str], Any]) -> None:
    meshes = [tuple(mesh) for mesh in load("meshes").meshes(4)]
    assert meshes == [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)]


def test_where_workers_share_cores_there_are_fewer_steps(load: Callable[[str], Any]) -> None:
    steps = load("steps")
    pace, mesh, cores = steps.Pace(1, 40), load("meshes").Mesh, steps.cores()
    assert pace.of(mesh(1, 1, 1)) == pace.of(mesh(cores, 1, 1)) == 40
    assert pace.of(mesh(2 * cores, 1, 1)) == 20
    assert pace.of(mesh(64 * cores, 1, 1)) == 10


def test_meshes_are_measured_once(load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, mesh = load("measure"), load("meshes").Mesh
    monkeypatch.setattr(measure, "meshes", lambda count: [mesh(count, 1, 1), mesh(1, count, 1)])
    words = [*SMALL, "--workers", "2", "--steps", "2", "--without-prediction", "--out", str(tmp_path)]
    assert measure.main(words) == 0
    sheet = tmp_path / "results" / "steps.csv"
    whole, part = read(sheet)
    assert int(whole["parameter_bytes"]) > int(part["parameter_bytes"]) > 0
    assert all(int(row["sent_bytes"]) > 0 < float(row["step_ms"]) for row in (whole, part))
    before = sheet.read_text(encoding="utf-8")
    assert measure.main(words) == 0
    assert sheet.read_text(encoding="utf-8") == before  # nothing was measured again
    assert measure.main(["--page", "--out", str(tmp_path)]) == 0
    assert "\n### 2 workers\n" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_sides_train_the_same_by_turns(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, mesh = load("measure"), load("meshes").Mesh
    monkeypatch.setattr(measure, "meshes", lambda count: [mesh(1, 1, count)])
    words = [*SMALL, "--beside", "--workers", "2", "--backends", "shm", "--turn", "0.001", "--out", str(tmp_path)]
    assert measure.main(words) == 0
    rows = read(tmp_path / "results" / "beside.csv")
    assert sorted(row["side"] for row in rows) == ["one process", "paceline", "torch"]
    assert all(float(row["difference"]) <= 1e-4 for row in rows)


def test_a_single_sample_is_asked_for(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    latency = load("latency")
    monkeypatch.setattr(latency, "WAYS", {latency.ONE: latency.WAYS[latency.ONE]})  # the others are predict's tests'
    (row,) = latency.rows("tiny", 2)
    assert (row["model"], row["of_one"]) == ("tiny", "1.000")
    assert float(row["call_ms"]) > 0


def test_the_page_says_what_shares_cores_and_what_was_predicted_badly(load: Callable[[str], Any]) -> None:
    usual = MACHINE | {"rounds": "5", "layers": "4", "width": "128"}
    sizes = dict.fromkeys(("sent_bytes", "parameter_bytes", "saved_bytes", "memory_bytes"), "1048576")

    def row(mesh: tuple[int, int, int], predicted: str, ratio: str) -> dict[str, str]:
        names = zip(("replicas", "stages", "shards"), map(str, mesh), strict=True)
        return {
            **dict(names),
            "step_ms": "80",
            "of_one": "0.5",
            "predicted_ms": predicted,
            "of_predicted": ratio,
            **sizes,
            **usual,
        }

    steps = [row((1, 2, 1), "79", "1.013"), row((2, 1, 1), "60", "1.333"), row((4, 1, 1), "", "")]
    sides = [
        row((1, 2, 1), "", "") | {"backend": "shm", "side": side, "of_torch": "0.9"} for side in ("torch", "paceline")
    ]
    calls = [MACHINE | {"model": "tiny", "way": "shards=2", "call_ms": "0.5", "of_one": "0.7", "rounds": "5"}]
    text = load("page").page(steps, sides, calls)
    assert "| 1 | 2 | 1 | 80.00 | **0.5** | 79.00 | 1.05 MB |" in text
    assert "### 4 workers\n\nThey share 2 cores" in text
    assert "### 2 workers\n\n| replicas" in text
    assert "replicas=1 stages=2 shards=1 micro_batches=4 threads=1: measured 1.013 of what was predicted\n" in text
    assert "replicas=2 stages=1 shards=1 threads=1: measured 1.333 of what was predicted (missed)" in text
    assert text.index("| shm | paceline | 80.00") < text.index("|  | torch | 80.00")
    assert "| tiny | shards=2 | 0.500 | **0.7** |" in text
