"""The scorecard in small: a few trials of each row, and its page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]


@pytest.mark.parametrize(("row", "trials"), [("kill", 4), ("gang", 2), ("stop", 1), ("main", 3), ("mutate", 200)])
def test_a_row_in_small(load: Load, row: str, trials: int) -> None:
    function, _ = load("rows").ROWS[row]
    outcome = function(trials)
    assert outcome.trials >= trials * 0.9, "mutations that change nothing are no trials"
    assert outcome.failures == []


def test_the_page_names_each_row_with_its_bound(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = load("page")
    facts = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}
    kept = {"row": "R1", "title": "kill", "passes": "none", "trials": 100, "failures": [], "figures": {"back_s": 0.125}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kill.json").write_text(json.dumps(kept | {"load": 0.5, "machine": facts}))
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    page.write_page()
    assert "| R1 | kill | none | 100 | 0 | ≤ 3.0% | back s 0.125 |" in (tmp_path / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("failures", "trials", "bound"), [(0, 100, 0.0295), (1, 100, 0.0466), (3, 20, 0.3437)])
def test_the_bound_is_that_of_clopper_and_pearson(load: Load, failures: int, trials: int, bound: float) -> None:
    """The published table of the one-sided 95 % limits."""
    assert load("page").bound(failures, trials) == pytest.approx(bound, abs=5e-4)
