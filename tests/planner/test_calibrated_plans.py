"""Plans of a shape that rows of measured runs calibrate."""

import csv
import json
from math import log
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import InputError, plan
from paceline.cli.main import app
from paceline.planner.calibration.corrections import Corrections
from paceline.planner.calibration.rows import PublishedRow
from tests.planner.published_rows import grid, row, timed

SHAPE = "[model]\nlayers = 24\nhidden = 2048\nheads = 16\n[train]\nglobal_batch = 64"
CLUSTER = "1x4 A100-80GB"


def write(folder: Path, rows: list[PublishedRow]) -> Path:
    path = folder / "rows.csv"
    names = list(dict.fromkeys(name for each in rows for name in each.cells))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(dict(each.cells) for each in rows)
    return path


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "shape.toml"
    path.write_text(SHAPE, encoding="utf-8")
    return path


def test_runs_of_twice_the_time_make_plans_of_twice_the_time(shape: Path, tmp_path: Path) -> None:
    """Rows of Paceline itself, all with the same error: its effect is that of every plan."""
    rows, found = grid("own", framework="Paceline", recompute="none", precision="bf16"), []
    for off in (0.0, log(2.0)):
        path = write(tmp_path, timed(rows, Corrections(), off=off, noise=0.05))
        found.append(plan(shape, cluster=CLUSTER, calibrate=path))
    plain, slow = (plans.best for plans in found)
    # Priors pull towards no error, and a part of it is taken for slower devices: these rows say twice, and few others.
    assert 1.5 < slow.cost.step_s / plain.cost.step_s < 2.3
    for plans in found:
        best = plans.best
        assert best.low_s < best.cost.step_s < best.high_s
        assert "calibrated by rows.csv" in best.provenance["spread"]
        assert best.samples_per_s == pytest.approx(best.arrangement.samples / best.cost.step_s)
        assert [each.cost.step_s for each in plans] == sorted(each.cost.step_s for each in plans)


def test_memory_that_was_measured_scales_memory(shape: Path, tmp_path: Path) -> None:
    own = timed(grid("own", framework="Paceline", recompute="none"), Corrections())
    small, large = (
        plan(
            shape, cluster=CLUSTER, calibrate=write(tmp_path, [PublishedRow({**r.cells, "mem_gib": gib}) for r in own])
        )
        for gib in ("10", "40")
    )
    peaks = {str(each.strategy): each.cost.peak.total for each in small}
    both = [peaks[name] / each.cost.peak.total for each in large if (name := str(each.strategy)) in peaks]
    assert both
    assert max(both) < 1
    assert max(each.cost.peak.total for each in large) <= 80 * 2**30
    assert "nine of ten within" in small.best.provenance["memory"]


def test_the_command_calibrates_all_that_it_says(shape: Path, tmp_path: Path) -> None:
    path = write(tmp_path, timed(grid("own"), Corrections(), off=1.0))
    words = ["plan", str(shape), "--cluster", CLUSTER, "--json"]
    plain, slow = (
        json.loads(CliRunner().invoke(app, [*words, *more]).stdout) for more in ([], ["--calibrate", str(path)])
    )
    assert slow["plans"][0]["step_s"] > plain["plans"][0]["step_s"]
    assert slow["curve"]["points"][0]["samples_per_s"] < plain["curve"]["points"][0]["samples_per_s"]
    assert "calibrated by rows.csv" in slow["provenance"]["links"]
    assert slow["provenance"]["products"] == "calibrated by rows.csv"
    assert plain["provenance"]["products"].endswith("by 27 published rows of 2 sources")


def test_what_is_measured_here_is_not_calibrated(shape: Path, tmp_path: Path) -> None:
    path = write(tmp_path, timed(grid("own"), Corrections()))
    with pytest.raises(InputError, match="is measured on this host"):
        plan("digits", calibrate=path)
    done = CliRunner().invoke(app, ["plan", str(shape), str(shape), "--cluster", CLUSTER, "--calibrate", str(path)])
    assert done.exit_code != 0
    assert "plan one of them" in done.output
    with pytest.raises(InputError, match="step_time_s"):
        plan(shape, cluster=CLUSTER, calibrate=write(tmp_path, [row("alone", n_devices=8)]))


def test_rows_that_can_not_be_used_are_named_and_the_others_calibrate(shape: Path, tmp_path: Path) -> None:
    own = timed(grid("own"), Corrections(), off=0.3)
    plans = [
        plan(shape, cluster=CLUSTER, calibrate=write(tmp_path, rows))
        for rows in (own, [*own, row("odd", zero="hsdp", step_time_s=1)])
    ]
    assert plans[0].best.cost.step_s == plans[1].best.cost.step_s
    assert "left out" not in plans[0].cluster.provenance
    assert plans[1].cluster.provenance["left out"].startswith("row odd: zero = 'hsdp' is no number")
