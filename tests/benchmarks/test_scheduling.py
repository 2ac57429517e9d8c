"""The benchmark of scheduled parameters: that its rows show what its page says, at a smaller size; and its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "scheduling"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_optimum_is_scikit_learns(load: Load) -> None:
    found = load("measure").optimum("500 × 200", "priority:at_once=8", 0)
    assert abs(found["objective"]) < 1e-8
    assert found["coefficients"] < 1e-6
    assert found["same_support"]


def test_the_check_prevents_divergence(load: Load) -> None:
    measure = load("measure")
    design = measure.Design(100, 60, 0.1, correlation=0.9, group=10)
    program, _, best = design.problem(0)
    assert measure.reached(program, "uniform:at_once=32,bound=none", best, 0)["updates_1e-4"] == "diverged"
    assert measure.reached(program, "uniform:at_once=32", best, 0)["updates_1e-4"] > 0


def test_priority_needs_half_of_the_updates_of_uniform_choice(load: Load) -> None:
    measure = load("measure")
    program, coefficients, best = measure.Design(200, 300, 0.1, power=2.0).problem(0)
    assert 0 < (coefficients != 0).sum() < 10
    needed = [measure.reached(program, side, best, 0, every=10)["updates_1e-4"] for side in ("priority", "uniform")]
    assert needed[0] <= needed[1] / 2, needed


def test_a_factorisation_and_its_division(load: Load) -> None:
    measure = load("measure")
    program = measure.ratings(0, rows=60, columns=40, ranks=3)
    run = measure.schedule_parameters(program, "cyclic", updates=30, tolerance=None)
    assert run.objective < run.history[0].objective / 5
    found = measure.imbalance(4, 0)
    assert found["by_cost"] < 1.02 < 2 < found["ranges"]


@pytest.mark.parametrize("diverged", [0, 3])
def test_the_page_has_medians(load: Load, tmp_path: Path, diverged: int) -> None:
    measure = load("measure")
    sheets = {name: measure.Sheet(tmp_path / f"{name}.csv", measure.KEYS) for name in measure.TABLES}
    case = "groups of 10 with correlation 0.9"
    for seed, rounds in enumerate([70, 50, 90, 1000, ""]):
        row = {"side": "uniform:at_once=8,bound=none", "case": case, "seed": seed}
        sheets["dependency"].put(row | {"rounds_1e-4": "diverged" if seed < diverged else rounds} | MACHINE)
        for side, updates in (("uniform", 300 + seed), ("priority", 100)):
            row = {"side": side, "case": "k^-2, λ = 0.05", "seed": seed, "nonzero": 4}
            sheets["power_law"].put(row | {f"updates_{near}": updates for near in measure.NEAR} | MACHINE)
    measure.page(sheets, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert f"| 8 | {'diverged' if diverged else '90'} |  |  |  |" in text
    counts = {"uniform": "302", "priority": "100"}
    cells = " | ".join(counts.get(side, "") for side in measure.CHOICES)
    assert f"| k^-2, λ = 0.05 | 4 | {cells} | 3.0 |" in text


def test_jobs_that_learn_at_different_speeds_gain_from_unequal_turns(load: Load) -> None:
    jobs = load("jobs")
    programs = jobs.jobs_of([0.2, 0.2, 0.2, 0.006], 0)
    needed = {}
    for side in ("cyclic", "priority"):
        found = jobs.share_workers(
            programs, "replicas=2", engine="virtual", seconds=8, slice_steps=50, scheduler=side, progress=False
        )
        needed[side] = jobs.figures(found)["seconds_0.5"]
    assert 0 < needed["priority"] < needed["cyclic"]


def test_figures_of_jobs_begin_with_their_starts(load: Load) -> None:
    """Mean 1.5 at first; 1 after 2 s; 0.5 never."""
    jobs = load("jobs")
    from paceline.core.records import Record
    from paceline.shared_runs import SharedRuns, Slice

    def made(job: str, *losses: float) -> Any:
        return Slice(job, 50, 1.0, tuple(Record(0.0, 0, 0, 1, None, loss) for loss in losses))

    found = jobs.figures(SharedRuns(["a", "b"], {}, [made("a", 2.0, 1.5), made("b", 1.0, 0.5)], ""))
    assert (found["seconds_1.0"], found["seconds_0.5"]) == (2.0, "")
    assert (found["mean"], found["largest"]) == (1.0, 1.5)


def test_the_page_is_that_of_the_rows(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    sheets = {name: measure.Sheet(FOLDER / "results" / f"{name}.csv", measure.KEYS) for name in measure.TABLES}
    measure.page(sheets, tmp_path)
    assert (tmp_path / "README.md").read_text("utf-8") == (FOLDER / "README.md").read_text("utf-8")
