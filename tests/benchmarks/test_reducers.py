"""The benchmark of updates that are no sum: that they hold against replicas that lie, and its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reducers"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_mean_fails_where_the_others_lose_two_points_at_the_most(load: Load) -> None:
    """Two of ten replicas send the gradient the other way, or noise."""
    measure = load("measure")
    honest = measure.accuracy_under("none", "synchronous", seed=0)
    assert honest > 0.9
    for rule, policy in measure.RULES.items():
        for attack in ("flipped", "noise"):
            found = measure.accuracy_under(attack, policy, seed=0)
            if rule == "mean":
                assert found < honest - 0.1, (attack, found)
            else:
                assert found > honest - 0.02, (rule, attack, found)


@pytest.mark.parametrize("replicas", [9, 25])
def test_deltas_are_as_stale_as_there_are_other_replicas(load: Load, replicas: int) -> None:
    found = load("measure").stale_figures(replicas, "0.04", 0)
    assert found["accuracy"] > 0.9
    assert found["staleness"] == pytest.approx(replicas - 1, rel=0.05)  # but for the first of each replica


def test_the_page_has_medians(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    sheet = measure.Sheet(tmp_path / "results" / "rows.csv", ("side", "case", "seed"))
    for seed, (accuracy, loss) in enumerate([(0.9, 0.5), (0.8, 0.25), (0.7, 1.0)]):
        for side, case in (("median", "noise"), ("strength 1", "25")):
            sheet.put(
                {"side": side, "case": case, "seed": seed, "accuracy": accuracy, "loss": loss, "staleness": 7.9}
                | MACHINE
            )
    measure.page(sheet, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| median | `robust` |  |  | 80.0% |" in text
    assert "accuracy, 9 replicas" in text  # of which there is no row
    assert "| λ = 1 |  |  | 80.0% | 0.5000 |" in text
