"""The page of limits: what other benchmarks' tables say of each, and a whole way from a measurement to the page."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"
FOLDER = ROOT / "limits"

Load = Callable[[str], Any]

KEPT = {
    "shards": ("tensor/results/steps.csv", {"mlp 256", "mlp 1024", "transformer", "resnet", "inception"}),
    "stages": ("pipeline/results/steps.csv", {"small, 1f1b", "large, zero-bubble"}),
    "gloo": ("pipeline/results/steps.csv", {"small, gpipe", "large, interleaved"}),
    "synchronous": ("data_parallel/results/data_parallel.csv", {"batch 32, 8 ranks", "batch 128, 2 ranks"}),
    "collectives": (
        "collectives/results/collectives.csv",
        {"all_reduce, 16,777,216 bytes", "send and back, 1,024 bytes"},
    ),
}
"""Sheets that these benchmarks have left, and some of what they say of a limit."""


@pytest.mark.parametrize("name", KEPT)
def test_figures_are_those_of_the_sheets_that_the_benchmarks_leave(load: Load, name: str) -> None:
    path, labels = KEPT[name]
    with (ROOT / path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if name in ("stages", "gloo"):
        rows = [row for row in rows if row["stages"] == "2"]
    if name == "synchronous":
        rows = [row for row in rows if row["model"] == "mlp" and row["ranks"] != "1"]
    if name == "collectives":
        rows = [row for row in rows if row["ranks"] == "8" and row["call"] in ("all_reduce", "send and back")]
        rows = [row for row in rows if row["bytes"] in ("1024", "16777216")]
    figures = list(load("limits").LIMITS[name].figures(rows))
    assert labels <= {figure.label for figure in figures}
    assert all(figure.value > 0 for figure in figures)


def test_zero_bubble_is_compared_with_what_it_took_turns_with(load: Load) -> None:
    rows = [
        {"size": size, "side": side, "backend": "shm", "schedule": schedule, "of_beside": ratio}
        | {"stages": "2", "one_ms": "60" if size == "small" else "600"}
        for size, side, schedule, ratio in (
            ("small", "paceline", "1f1b", ""), ("small", "paceline, 1f1b", "zero-bubble", "1.0"),
            ("small", "paceline", "zero-bubble", "1.1"), ("large", "paceline", "zero-bubble", "1.1"),
        )
    ]  # fmt: skip
    small, large = load("limits").LIMITS["zero-bubble"].figures(rows)
    assert (small.label, small.value, small.met, small.instead) == ("small", 1.1, True, "not proposed")
    assert (large.label, large.value, large.met, large.instead) == ("large", 1.1, False, "")


def test_the_worst_of_all_models_counts_of_single_samples(load: Load) -> None:
    rows = [
        {"row": row, "side": side, "backend": "shm", "forward_of_one": ratio}
        for row, side, ratio in (("a", "paceline", "0.9"), ("b", "paceline", "1.2"), ("c", "DTensor", "3"))
    ]
    [figure] = load("limits").LIMITS["samples"].figures(rows)
    assert (figure.label, figure.value, figure.met) == ("the worst, b", 1.2, False)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hogwild", "| workers | Paceline | ratio |\n|---|---|---|\n| 2 | 9 | 1.10 |\n| 8 | 9 | 2 |", 1.1),
        ("asynchronous", "| Ray | ratio | graph ratio |\n|---|---|---|\n| 100 | 9.00 | 12.00 |", 9.0),
        ("plans", "| model | CPU seconds | plan |\n|---|---|---|\n| t5-2 | 0.08 (0.07 to 0.1) | x |", 0.08),
        (
            "first-step",
            "| model | strategy | tree | seconds | of the floor |\n|---|---|---|---|---|\n"
            "| gpt2 | floor | this | 7 |  |\n| gpt2 | stages=2 | this | 8.7 | 1.15 (1.1 to 1.2) |",
            1.15,
        ),
    ],
)  # fmt: skip
def test_figures_are_those_of_the_tables_that_the_benchmarks_print(
    load: Load, name: str, text: str, value: float
) -> None:
    figure, *others = load("limits").LIMITS[name].figures(list(load("measure").printed(text)))
    assert figure.value == value
    assert [(each.label, each.value) for each in others] == (
        [("compile=graph", 12.0)] if name == "asynchronous" else []
    )


def test_a_row_is_measured_once_and_told_on_the_page(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, page, limits = load("measure"), load("page"), load("limits")
    small = ("--models", "mlp", "--optimizers", "sgd", "--engines", "distributed", "--pairs", "1", "--steps", "20")
    tried = limits.LIMITS["one-replica"]._replace(command=("limits/one_replica.py", *small))
    for module in (measure, page):
        monkeypatch.setattr(module, "LIMITS", {"one-replica": tried})
    words = ["--rows", "one-replica", "--out", str(tmp_path)]
    assert measure.main(words) == 0
    sheet = tmp_path / "results" / "limits.csv"
    before = sheet.read_text(encoding="utf-8")
    assert measure.main(words) == 0
    assert sheet.read_text(encoding="utf-8") == before  # nothing was measured again
    sheet.write_text(before.replace(", distributed", ", elsewhere"), encoding="utf-8")
    assert measure.main([*words, "--again"]) == 0
    assert "elsewhere" not in sheet.read_text(encoding="utf-8"), "a label that is no more is dropped"
    assert measure.main(["--page", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| one replica's step ÷ the plain loop's, one thread | mlp, sgd, distributed |" in text


@pytest.mark.parametrize(
    ("value", "bound", "aim", "said"),
    [
        ("0.55", "0.70", "≤ 0.6", ""),
        ("0.70", "0.58", "≤ 0.6", "missed"),
        ("0.70", "", "≤ 0.6", "missed"),
        ("0.70", "0.62", "≤ 0.6", "out of reach"),
        ("0.90", "0.95", "≥ 1", "out of reach"),
        ("0.90", "1.10", "≥ 1", "missed"),
    ],
)
def test_the_page_says_what_a_bound_forbids(load: Load, value: str, bound: str, aim: str, said: str) -> None:
    met = str(not said)
    row = {"row": "shards", "label": "mlp 256", "value": value, "bound": bound, "aim": aim, "met": met}
    machine = {"processor": "P", "cores": "2", "system": "Linux", "torch": "2", "python": "3", "date": "2026-01-01"}
    line = next(line for line in load("page").page([row | machine]).splitlines() if "| mlp 256 |" in line)
    assert [cell.strip() for cell in line.split("|")][3:7] == [value, bound and f"{float(bound):.2f}", aim, said]


def test_a_command_that_fails_ends_it(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, limits = load("measure"), load("limits")
    failing = limits.LIMITS["one-replica"]._replace(command=("limits/one_replica.py", "--models", "none"))
    monkeypatch.setattr(measure, "LIMITS", {"one-replica": failing})
    assert measure.main(["--rows", "one-replica", "--out", str(tmp_path)]) == 2
    assert not (tmp_path / "results").exists()
