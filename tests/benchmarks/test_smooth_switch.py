"""The Smooth Switch benchmark: its arithmetic and what it writes, from results that are made up and so known."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smooth_switch"

SHIFT = {"synchronous": -20.0, "asynchronous": 0.0, "smooth-switch": 2.0}
"""Accuracy against the asynchronous algorithm's, in points; losses move a tenth as far the other way."""


@pytest.fixture
def fill(load: Callable[[str], Any], tmp_path: Path) -> Callable[..., Any]:
    """Make up the runs of tables in a cache; returns a study of them."""

    def filled(*numbers: int, rounds: int = 3, diverge: str = "", **options: Any) -> Any:
        study = load("study").Study(load("cells").Store(tmp_path / "cache", {}), rounds=rounds, **options)
        for number in numbers:
            for configuration in load("protocol").TABLES[number].configurations:
                for algorithm, cells in study.cells(configuration).items():
                    for cell in cells:
                        result = made_up(load, algorithm, cell.round, diverged=algorithm == diverge)
                        path = tmp_path / "cache" / f"{cell.name}.json"
                        path.write_text(json.dumps({"cell": asdict(cell), "result": asdict(result)}))
        return study

    return filled


def made_up(load: Callable[[str], Any], algorithm: str, number: int, *, diverged: bool) -> Any:
    if diverged:
        return replace(load("cells").CHANCE, test_loss=math.inf)
    shift = SHIFT[algorithm] * (1 + (number - 1) / 10)
    means = {"test_accuracy": 80 + number + shift, "test_loss": 1 - shift / 10, "train_loss": 1 - shift / 10}
    curve = {"time_s": [0.0, 50.0, 100.0]} | {metric: [value] * 3 for metric, value in means.items()}
    return load("cells").Result(updates=10, gradients=20, curve=curve, **means)


def run(load: Callable[[str], Any], tmp_path: Path, *words: str) -> int:
    status: int = load("measure").main([*words, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")])
    return status


def test_differences_are_paired_by_round(load: Callable[[str], Any], fill: Callable[..., Any]) -> None:
    # Rounds lie a point apart, differences are 1.8, 2.0 and 2.2: t(0.975, 2) · 0.2 / √3 = 0.4968.
    entry = fill(4).entries(load("protocol").TABLES[4])[0]
    assert (entry.metric, entry.label, entry.paper) == ("test_accuracy", "1/lr", 0.136)
    assert entry.ours == pytest.approx(2.0)
    assert entry.half_width == pytest.approx(0.4968, abs=1e-4)


def test_signs_are_counted_against_the_papers(load: Callable[[str], Any], fill: Callable[..., Any]) -> None:
    study, tables = fill(1, 4), load("protocol").TABLES
    tally = load("study").tally
    assert tally(study.entries(tables[4])) == load("study").Tally(15, 15, 0)
    # Of table 1 two entries have the sign that the method does not claim: both of (300, 64).
    assert tally(study.entries(tables[1])) == load("study").Tally(12, 10, 2)


def test_the_tables_have_the_69_entries_of_the_paper(load: Callable[[str], Any]) -> None:
    tables = load("protocol").TABLES.values()
    assert sum(len(values) for table in tables for values in table.paper.values()) == 69


@pytest.mark.parametrize(
    ("diverge", "ours", "agrees"), [("smooth-switch", math.inf, False), ("asynchronous", -math.inf, True)]
)
def test_a_loss_that_overflows_is_worse_than_any(
    diverge: str, ours: float, agrees: bool, load: Callable[[str], Any], fill: Callable[..., Any]
) -> None:
    study, table = fill(4, diverge=diverge), load("protocol").TABLES[4]
    losses = [entry for entry in study.entries(table) if entry.metric == "test_loss"]
    assert {entry.ours for entry in losses} == {ours}
    assert {entry.agrees for entry in losses} == {agrees}
    assert study.diverged(table) == 15


def test_losses_that_overflow_on_either_side_give_no_sign(load: Callable[[str], Any]) -> None:
    study = load("study")
    good, bad = (made_up(load, "asynchronous", 0, diverged=bad) for bad in (False, True))
    ours, half_width = study._difference("test_loss", {"smooth-switch": [good, bad], "asynchronous": [bad, good]})
    assert math.isnan(ours)
    assert math.isnan(half_width)
    assert not load("tables").Entry("test_loss", "", 0.1, ours, half_width).agrees


def test_other_engines_measure_their_own_times(load: Callable[[str], Any], fill: Callable[..., Any]) -> None:
    assumptions = load("assumptions").Assumptions(workers=4, cap=4)
    study = fill(engine="local", seconds=7.0, assumptions=assumptions)
    cells = study.needed(load("protocol").TABLES[3].configurations)
    assert {(cell.engine, cell.times, cell.seconds, cell.workers) for cell in cells} == {("local", "", 7.0, 4)}
    assert len(cells) == len(set(cells)) == 3 * 5 * 3


def test_needed_runs_come_round_after_round(load: Callable[[str], Any], fill: Callable[..., Any]) -> None:
    study = fill()
    rounds = [cell.round for cell in study.needed(load("protocol").TABLES[1].configurations)]
    assert rounds == sorted(rounds)
    varied = [cell.round for cell in load("sensitivity").needed(study, load("sensitivity").VARIATIONS)]
    assert varied == sorted(varied)


def test_every_variation_changes_something_else(load: Callable[[str], Any]) -> None:
    listed = [variation.assumptions for variation in load("sensitivity").VARIATIONS]
    assert len(set(listed)) == len(listed)
    changed = {f.name for a in listed for f in fields(a) if getattr(a, f.name) != f.default}
    images_only = {"pixels"}  # varied in tables 1 and 2, by --assume
    assert changed == {f.name for f in fields(listed[0])} - {"rate", "workers"} - images_only


def test_the_fitted_server_replaces_the_prototypes(load: Callable[[str], Any]) -> None:
    module = load("sensitivity")
    changes = {v.change for v in module.variations({"ray": {"apply_s": 0.004, "gradient_s": 0.002}})}
    assert "apply_s=0.004 gradient_s=0.002" in changes
    assert module.FITTED not in changes
    assert module.variations({}) == module.VARIATIONS


def test_an_effect_counts_and_averages(load: Callable[[str], Any], fill: Callable[..., Any]) -> None:
    module, study = load("sensitivity"), fill(3, 4, 5)
    assert [effect.variation.change for effect in module.effects(study, module.VARIATIONS)] == ["defaults"]
    row = module.effects(study, module.VARIATIONS)[0].row()
    assert (row["agree"], row["entries"], row["clearly_against"], row["diverged_runs"]) == (45, 45, 0, 0)
    assert float(row["test_accuracy_mean_difference"]) == pytest.approx(2.0)


def test_every_assumption_has_its_line(load: Callable[[str], Any]) -> None:
    assert list(load("sections").OPEN) == [field.name for field in fields(load("assumptions").Assumptions)]


def test_a_table_and_its_figure_are_written(
    load: Callable[[str], Any], fill: Callable[..., Any], tmp_path: Path
) -> None:
    fill(4)
    assert run(load, tmp_path, "--table", "4", "--figure", "9", "--rounds", "3") == 0
    rows = load("sheets").read(tmp_path / "out" / "table_4.csv")
    assert len(rows) == 15
    assert {(row["agrees"], row["clear"], row["engine"]) for row in rows} == {("True", "True", "virtual")}
    assert len(load("sheets").read(tmp_path / "out" / "table_4_runs.csv")) == 5 * 3 * 3
    assert (tmp_path / "out" / "figure_9.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "figure_9.svg").read_text(encoding="utf-8")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "**15 of 15** (100 %)" in page
    assert "+2.000 ± 0.497 ✓" in page
    assert "![Figure 9](figure_9.png)" in page
    assert "not counted: 1, 2, 3, 5" in page


def test_curves_are_drawn_without_what_diverged(
    load: Callable[[str], Any], fill: Callable[..., Any], tmp_path: Path
) -> None:
    figures = load("figures")
    paths = figures.draw(fill(2, diverge="synchronous"), 6, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert "CIFAR-10 (JPEG copy), step size 300" in paths[1].read_text(encoding="utf-8")


def test_the_page_lists_entries_with_the_other_sign(
    load: Callable[[str], Any], fill: Callable[..., Any], tmp_path: Path
) -> None:
    fill(1)
    assert run(load, tmp_path, "--page", "--rounds", "3") == 0
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert page.count("\n- table 1, (300, 64)") == 2
    assert "test accuracy: paper -0.516, ours +2.000 ± 0.497; the interval leaves 0 out" in page


def test_another_reading_has_a_folder_of_its_own(
    load: Callable[[str], Any], fill: Callable[..., Any], tmp_path: Path
) -> None:
    fill(4, assumptions=replace(load("assumptions").Assumptions(), combine="mean", hold=False))
    assert run(load, tmp_path, "--table", "4", "--rounds", "3", "--assume", "combine=mean hold=false") == 0
    assert (tmp_path / "out" / "combine=mean_hold=false" / "table_4.csv").exists()


def test_real_workers_stand_beside_virtual_time(
    load: Callable[[str], Any], fill: Callable[..., Any], tmp_path: Path
) -> None:
    fill(4)
    fill(4, rounds=1, engine="local", seconds=7.0, assumptions=load("assumptions").Assumptions(workers=4, cap=4))
    local = ("--engine", "local", "--workers", "4", "--seconds", "7", "--rounds", "1")
    assert run(load, tmp_path, "--table", "4", *local) == 0
    assert run(load, tmp_path, "--page", "--rounds", "3") == 0
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| local | [4](local/table_4.csv) | 4 | 7 | 1 | 15 of 15 | 15 of 15 |" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "write --table all"),
        (("--table", "1"), "write --data DIR, with DIR/mnist in it"),
        (("--table", "1", "--mnist", "/nowhere"), "--mnist /nowhere: there is no such folder"),
        (("--table", "3", "--assume", "combined=mean"), "'combined=mean' is no assumption; write name=value"),
    ],
)
def test_errors_say_what_to_write(
    words: tuple[str, ...],
    says: str,
    load: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(load, tmp_path, *words) == 2
    assert says in capsys.readouterr().err


def test_ctrl_c_ends_cleanly(
    load: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load("cells").Store, "make", interrupted)
    assert run(load, tmp_path, "--table", "3") == load("measure").STOPPED
    assert "the same command goes on" in capsys.readouterr().err


def test_a_cell_is_run_in_virtual_time(load: Callable[[str], Any]) -> None:
    configuration = load("protocol").TABLES[3].configurations[0]
    policy = configuration.policies(load("assumptions").Assumptions())["smooth-switch"]
    cell = replace(configuration.cell(policy, 0, load("assumptions").Assumptions(), 1e-3), seconds=0.2, points=2)
    result = load("cells").run(cell, {})
    assert result.curve["time_s"] == [0.0, 0.1, 0.2]
    assert 0 < result.updates <= 0.2 / 0.008
    assert not result.diverged


def test_a_run_that_ctrl_c_cut_short_is_no_result(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = load("cells")
    cut = SimpleNamespace(summary={"interrupted": True}, history=[])
    monkeypatch.setattr(cells, "train", lambda *_, **__: cut)
    with pytest.raises(KeyboardInterrupt):
        cells.run(cells.Cell("synthetic", "asynchronous"), {})


def test_only_image_sets_need_files(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, cells = load("measure"), load("cells")
    made: list[Any] = []
    monkeypatch.setattr(cells.Store, "make", lambda _store, wanted, _processes: made.extend(wanted))
    embedded = [cells.Cell(name, "asynchronous") for name in ("synthetic", "digits")]
    measure.make(cells.Store(tmp_path, {}), embedded, {}, 1)
    assert made == embedded
    with pytest.raises(load("measure").InputError, match="runs on mnist are to be made"):
        measure.make(cells.Store(tmp_path, {}), [cells.Cell("mnist", "asynchronous")], {}, 1)


def test_one_policy_has_one_text(load: Callable[[str], Any]) -> None:
    cell = load("cells").Cell
    long, short = (cell("synthetic", f"smooth-switch:every=300,combine=sum{rest}") for rest in (",hold=true", ""))
    assert long == short
    assert long.name == short.name


def test_contests_come_back_from_their_sheet(load: Callable[[str], Any], tmp_path: Path) -> None:
    regret, sheets = load("regret"), load("sheets")
    regime = next(load("regimes").the_map())
    names = ("synchronous", "asynchronous", "5/lr", "adaptive")
    standings = {name: regret.Standing(80.0 + i, 90.0, float("inf") if i else 12.0, i) for i, name in enumerate(names)}
    made = regret.Contest(regime, standings)
    path = tmp_path / "regimes.csv"
    sheets.write(path, list(regret.sheet_rows("map", [made], 2)))
    assert regret.kept(path, {"map": [regime]}) == {("map", regime.label, 2): made}
    assert regret.kept(path, {"map": []}) == {}
    assert regret.kept(tmp_path / "none.csv", {"map": [regime]}) == {}
