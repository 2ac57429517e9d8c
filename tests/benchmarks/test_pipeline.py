"""The benchmark of pipelines: its ideal, its checks, and its whole way from a measurement to the page."""

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "pipeline"

TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # several processes each import torch, on however few cores there are

CELL = ("--sizes", "tiny", "--stages", "2")

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
    words = (*CELL, "--backends", "shm", "--schedules", "interleaved", "zero-bubble", "--pairs", "2", "--turn", "0.001")
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    steps = rows(tmp_path, "steps")
    sides = [("interleaved", side) for side in ("paceline", "torch", "torch on gloo")]
    sides += [("zero-bubble", side) for side in ("paceline", "paceline, 1f1b")]
    assert sorted((row["schedule"], row["side"]) for row in steps) == sides
    assert [row["pairs"] for row in steps] == ["2"] * 5
    assert [float(row["of_beside"]) > 0 for row in steps if row["of_beside"]] == [True, True]
    assert all(float(row["difference"]) <= 1e-5 for row in steps)
    assert all(float(row["of_ideal"]) > 0 for row in steps)
    assert load("measure").main([*words, "--out", str(tmp_path)]) == 0
    assert rows(tmp_path, "steps") == steps  # nothing was measured again
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    told = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| shm |")]
    assert [tuple(word.strip() for word in line) for line in told] == sides


def test_memory_is_counted_for_each_stage_and_drawn(load: Callable[[str], Any], tmp_path: Path) -> None:
    done = run(tmp_path, "--memory", *CELL, "--ways", "gpipe", "--counts", "2", "4")
    assert done.returncode == 0, done.stderr
    found = {
        (row["way"], row["micro_batches"], row["stage"]): int(row["peak_saved_bytes"])
        for row in rows(tmp_path, "memory")
    }
    assert {stage for _, _, stage in found} == {"0", "1"}
    assert found["gpipe", "4", "0"] == 2 * found["gpipe", "2", "0"] > 0
    assert load("measure").main(["--page", "--out", str(tmp_path)]) == 0
    assert "![memory_tiny](results/memory_tiny.png)" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "results" / "memory_tiny.png").stat().st_size > 0
    assert (tmp_path / "results" / "memory_tiny.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_stages_that_cannot_be_equal_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--stages", "3")
    assert done.returncode == 2
    assert "--stages 3 can't have 8 layers in two equal parts each; write --stages 2 4" in done.stderr


def test_the_ideal_is_what_the_schedule_makes_of_stage_times(load: Callable[[str], Any]) -> None:
    from paceline.schedule import parse

    ideal = load("ideal")
    # Of p equal stages a mini-batch takes (m + p - 1) times a stage's forward and backward, and at the end the update.
    equal = [ideal.PartTimes(1.0, 2.0, 1.0)] * 4
    for name in ("gpipe", "1f1b"):
        assert ideal.ideal_s(parse(name), equal, [0.5] * 4, 8, cores=4) == pytest.approx(3 * (8 + 3) + 0.5, abs=1e-6)
    # ZB-H1 has a third of their bubble where forward and both halves take the same: (p - 1)(F + I - W).
    assert ideal.ideal_s(parse("zero-bubble"), equal, [0.5] * 4, 8, cores=4) == pytest.approx(3 * 8 + 3 + 0.5, abs=1e-6)
    # The last worker to be ready counts, not the one with the longest update.
    assert ideal.ideal_s(parse("gpipe"), equal[:2], [0.0, 1.0], 8, cores=2) == pytest.approx(27.0, abs=1e-6)
    # Two cores can't do the work of four workers any quicker than one after the other on each.
    assert ideal.ideal_s(parse("gpipe"), equal, [0.5] * 4, 8, cores=2) == pytest.approx((4 * 8 * 3 + 2) / 2, abs=1e-6)


def test_the_simple_ideal_is_that_of_equal_stages(load: Callable[[str], Any]) -> None:
    from paceline.schedule import parse

    ideal = load("ideal")
    assert ideal.simple_s(16.0, parse("1f1b"), 2, 8) == pytest.approx(16 / 2 * 9 / 8)
    assert ideal.simple_s(16.0, parse("interleaved"), 2, 8) == pytest.approx(16 / 2 * 17 / 16)


def test_all_parts_together_are_the_model(load: Callable[[str], Any]) -> None:
    models = load("models")
    size = models.SIZES["tiny"]
    model, (x, _) = size.built(), size.batch(2)
    for count in (1, 2, 4, 8):
        parts = models.parts(model, count)
        assert [name for part in parts for name, _ in part.named_parameters()] == [
            n for n, _ in model.named_parameters()
        ]
        assert models.cuts(count) == tuple(next(iter(part._modules)) for part in parts[1:])
        made = x
        for part in parts:
            made = part(made)
        torch.testing.assert_close(made, model(x), rtol=0, atol=0)


def test_a_side_that_does_less_is_refused(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("checks")
    monkeypatch.setattr(checks, "largest", lambda value: value)
    monkeypatch.setattr(checks, "gathered", lambda value: [value])
    same = {"a": torch.full((2,), 0.5), "b": torch.zeros(1)}
    assert checks.differences({"one": same, "other": same}, "one") == {"one": 0.0, "other": 0.0}
    off = same | {"a": torch.tensor([0.5, 0.50002])}
    with pytest.raises(ArithmeticError, match=r"other ended 2.*e-05 from one"):
        checks.differences({"one": same, "other": off}, "one")
    part = {"a": same["a"]}
    with pytest.raises(ArithmeticError, match=r"other has not trained \['b'\] as one has"):
        checks.differences({"one": same, "other": part}, "one")


def test_ends_that_are_where_all_began_say_nothing(load: Callable[[str], Any]) -> None:
    checks, job = load("checks"), load("job")
    here = job.Job("tiny", 2)
    start = {name: p.detach() for name, p in here.model.built().named_parameters()}
    with pytest.raises(ArithmeticError, match=r"no parameter has gone further than 0"):
        checks.moved(here, start)
    name = next(iter(start))
    assert checks.moved(here, start | {name: start[name] + 0.5}) == pytest.approx(0.5)


def test_the_page_says_what_is_not_as_it_is_to_be(load: Callable[[str], Any]) -> None:
    def step(size: str, stages: int, schedule: str, side: str, of_ideal: float, of_torch: float) -> dict[str, str]:
        cell = {"size": size, "stages": str(stages), "backend": "shm", "schedule": schedule, "side": side}
        times = {"step_ms": "10.0", "ideal_ms": "9.0", "one_ms": "16.0", "simple_ms": "9.0"}
        ratios = {"of_ideal": f"{of_ideal:.3f}", "of_torch": f"{of_torch:.3f}", "of_torch_on_gloo": "0.850"}
        return cell | times | ratios | {"difference": "0.0", "steps": "4", "pairs": "9", "clock": "wall"} | MACHINE

    def kept(way: str, micro_batches: int, mib: float) -> dict[str, str]:
        fill = {"size": "small", "stages": "4", "way": way, "micro_batches": str(micro_batches), "stage": "0"}
        return fill | {"peak_saved_bytes": str(int(mib * 2**20))} | MACHINE

    steps = [
        step("large", 2, "gpipe", "paceline", 1.03, 0.9), step("large", 2, "1f1b", "paceline", 1.05, 1.01),
        step("large", 2, "1f1b", "torch", 1.2, 1.0), step("small", 4, "1f1b", "paceline", 3.0, 2.0),
    ]  # fmt: skip
    saved = [
        kept("gpipe", 8, 8), kept("gpipe", 64, 64), kept("1f1b", 8, 4), kept("1f1b", 64, 5),
        kept("gpipe, boundaries", 8, 4.5), kept("1f1b, boundaries", 8, 2),
    ]  # fmt: skip
    text = load("page").page(steps, saved, [Path("memory_small.png"), Path("swimlane_1f1b_small_2.svg")])
    expected = """\
- large, shm, gpipe: of the ideal 1.030
- large, shm, gpipe: of torch 0.900
- large, shm, gpipe: of torch on gloo 0.850
- large, shm, 1f1b: of the ideal 1.050 (missed)
- large, shm, 1f1b: of torch 1.010 (missed)
- large, shm, 1f1b: of torch on gloo 0.850
"""
    assert f"\n\n{expected}\n" in text
    expected = """\
- small, 4 stages: 1f1b keeps 1.25 times as much with m = 64 as with m = 8 (missed)
- small, 4 stages: gpipe keeps 8.00 times as much with m = 64 as with m = 8
- small, 4 stages: gpipe with recomputation, on every stage, keeps at most 0.562 of what it keeps without (missed)
- small, 4 stages: 1f1b with recomputation, on every stage, but the last, keeps at most 0.500 of what it keeps without
"""
    assert f"\n\n{expected}\n" in text
    assert (
        "## A step of 1f1b on `small`, 2 stages\n\n![A step and its ideal](results/swimlane_1f1b_small_2.svg)" in text
    )
    assert "| gpipe | 0 | 8.000 | 64.000 |" in text
