"""The benchmark of plans for this host: models, rows, the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import Strategy
from paceline.api.train import check

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"

MACHINE = {"processor": "p", "cores": "2", "system": "s", "torch": "t", "python": "3", "date": "2026-11-22"}


def predicted(side: str, strategy: str, step_s: float, **more: object) -> dict[str, str]:
    row = {"model": "m", "side": side, "strategy": strategy, "step_s": step_s, "closed_s": step_s * 2}
    return {
        name: str(value)
        for name, value in (row | {"held_bytes": 2**20, "chosen": 0, "ran": 0} | more | MACHINE).items()
    }


def measured(side: str, number: int, step_s: float) -> dict[str, str]:
    row = {"model": "m", "side": side, "round": number, "step_s": step_s, "held_bytes": 2**21}
    return {name: str(value) for name, value in (row | MACHINE).items()}


def test_six_models_make_a_step_however_they_are_divided(load: Callable[[str], Any]) -> None:
    models = load("host_models").MODELS
    assert len(models) == 7
    for name, model in models.items():
        program = model.program(name, 4)
        for strategy in ("replicas=2", "stages=2", "shards=2"):
            check(program, Strategy.parse(strategy), steps=1)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [([3.0, 1.0, 2.0], (1.0, 3.0)), ([float(n) for n in range(1, 10)], (2.0, 8.0)), ([1.0], (1.0, 1.0))],
)
def test_the_interval_of_a_median(load: Callable[[str], Any], runs: list[float], expected: tuple[float, float]) -> None:
    assert load("host_page").interval(runs) == expected


def test_the_page_says_how_far_off_and_what_a_choice_costs(load: Callable[[str], Any]) -> None:
    rows = [predicted("alone", "replicas=1", 0.010, chosen=1), predicted("replicas", "replicas=2", 0.012)]
    runs = [measured("alone", n, 0.0125) for n in range(9)] + [measured("replicas", n, 0.010) for n in range(9)]
    text = load("host_page").page(rows, runs)
    assert "| m | replicas=1 | 10.00 | 12.50 (12.50 to 12.50) | 1.25 | 20.00 | no | 1 | 2 | 2.00 |" in text
    assert "- step time, from pieces: 20.0% on average, 20.0% at the most, 0 of 2 within 10 %" in text
    assert "- memory: 50.0% on average" in text
    assert "- m: replicas=1, 25.0% slower than replicas=2; their intervals don't overlap" in text


def test_what_is_there_is_not_measured_again(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, ran = load("host"), list[str]()

    class Sides:
        def __init__(self, name: str, program: object, seconds: float) -> None:
            self.name = name

        def predicted(self, known: Any) -> list[dict[str, str]]:
            return [] if known.rows else [predicted("alone", "replicas=1", 0.01) | {"model": self.name}]

        def run(self, row: dict[str, str]) -> dict[str, object]:
            ran.append(row["strategy"])
            return {"step_s": 0.01, "held_bytes": 2**20}

    monkeypatch.setattr(host, "Sides", Sides)
    words = ["--models", "tiny", "--rounds", "2", "--out", str(tmp_path)]
    assert host.main([*words[:2], "--page", "--out", str(tmp_path)]) == 2  # nothing to write a page of
    assert host.main(words) == host.main(words) == 0
    assert ran == ["replicas=1"] * 2
    assert host.main(["--page", "--out", str(tmp_path)]) == 0
    assert "| tiny | replicas=1 |" in (tmp_path / "host.md").read_text(encoding="utf-8")
