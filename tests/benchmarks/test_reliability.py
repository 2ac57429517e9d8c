"""The scorecard in small: a few trials of each row, and its page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]


REDUCED = {
    "kill": 2, "protocol": 1, "nan": 1, "main": 1, "mutate": 100, "sigterm": 1,
}  # fmt: skip
"""Row -> trials: few, for the rows themselves are the measurement. Those that need root are not among them."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", REDUCED)
def test_a_row_in_small(load: Load, row: str) -> None:
    outcome = load("rows").ROWS[row].run(REDUCED[row])
    assert outcome.trials >= REDUCED[row] * 0.9, "mutations that change nothing are no trials"
    assert outcome.failures == []


@pytest.mark.parametrize("row", ["disk", "inodes", "read-only", "file-size", "memory"])
def test_a_row_that_needs_root_in_small(load: Load, row: str) -> None:
    disk = load("rows.disk")
    reason = disk.why_not()
    if reason is not None:
        pytest.skip(reason)
    if row == "memory" and not load("rows.memory").GROUPS.is_dir():
        pytest.skip("no cgroup of version 1 with a memory controller")
    assert load("rows").ROWS[row].run(1).failures == []


def test_every_number_of_the_scorecard_that_has_a_row_has_one_of_its_own(load: Load) -> None:
    rows = load("rows").ROWS
    assert len(rows) >= 30
    assert all(row.trials >= row.stated >= 1 for row in rows.values())
    assert {"DDP on Gloo", "torchft", "Ray Train"} <= {other for row in rows.values() for other in row.others}
    assert all(row.run.__doc__ and row.run.__doc__.startswith("R") for row in rows.values())


def test_the_page_has_rows_bounds_comparators_and_points(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = load("page")
    facts = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}
    kept = {"row": "R1", "title": "kill", "passes": "none", "trials": 100, "stated": 100, "failures": [], "unnamed": []}
    others = {"DDP on Gloo": {"trials": 5, "told": "the run ends", "figures": {"end_s": 0.5}}}
    kept |= {"figures": {"back_s": 0.125}, "load": 0.5, "machine": facts, "others": others}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kill.json").write_text(json.dumps(kept))
    (tmp_path / "results" / "stop.json").write_text(json.dumps(kept | {"row": "R5", "stated": 200, "others": {}}))
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "rows_of", lambda number: ["one", "another"] if number == "R2" else ["one"])
    page.write_page()
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| R1 | kill | none | 100 | 0 | ≤ 3.0% | back s 0.125 |" in text
    assert "| R5 | kill | none | 100 of 200 | 0 | ≤ 3.0% | back s 0.125 |" in text
    assert "| R1 | kill | the run ends; end s 0.5 (n = 5) | — | — |" in text
    assert "| R1 | 1 of 1 | 3 | 1 | 1 | 5 |" in text
    assert "| R5 | 1 of 1 | 0 | 1 | 0 | 1 |" in text
    assert "| R2 | 0 of 2 | 0 | 0 | 0 | 0 |" in text
    assert "## Score: 6 of 100" in text


def test_points_are_lost_by_one_failure_or_one_message_that_does_not_name(load: Load) -> None:
    page = load("page")
    row: dict[str, Any] = {"trials": 10, "stated": 10, "failures": [], "unnamed": []}
    assert page.points([row], 1) == (3, 1, 0)
    assert page.points([row], 2) == (0, 1, 0)
    assert page.points([row, row | {"failures": ["late"]}], 2) == (0, 1, 0)
    assert page.points([row, row | {"unnamed": ["Error"]}], 2) == (3, 0, 0)
    assert page.points([row | {"others": {"torchft": {"trials": 0}}}], 1) == (3, 1, 0)


@pytest.mark.parametrize(("failures", "trials", "bound"), [(0, 100, 0.0295), (1, 100, 0.0466), (3, 20, 0.3437)])
def test_the_bound_is_that_of_clopper_and_pearson(load: Load, failures: int, trials: int, bound: float) -> None:
    """The published table of the one-sided 95 % limits."""
    assert load("page").bound(failures, trials) == pytest.approx(bound, abs=5e-4)


@pytest.mark.parametrize(
    ("arrived", "lead"), [([(0.5, 0), (1.5, 0), (1.6, 1)], 1), ([(0.5, 0), (1.5, 0), (2.5, 1)], 2)]
)
def test_a_lead_is_counted_by_what_main_has_received(load: Load, arrived: list[tuple[float, int]], lead: int) -> None:
    """Replica 1 notes at 3 that it has begun its second step; its first Δ was there before or after the third of 0."""
    begun = load("injector").Begun
    steps = [begun(0.0, 0, 1, 7), begun(0.0, 1, 1, 8), begun(1.0, 0, 2, 7), begun(2.0, 0, 3, 7), begun(3.0, 1, 2, 8)]
    assert load("rows.pace")._lead(steps, arrived) == lead
