"""What results show of themselves: a line at a prompt, a table in a notebook, a figure on request."""

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.comparison import Comparison
from paceline.core.errors import InputError
from paceline.core.records import Record
from paceline.shared_runs import SharedRuns, Slice
from tests.report.plausible import ASYNCHRONOUS, SWITCHING, comparison, run

SHAPE = "[model]\nlayers = 12\nhidden = 768\nheads = 12\n[train]\nglobal_batch = 64"


def shared() -> SharedRuns:
    records = (Record(0.0, 0, 0, 1, None, 2.0, 2.1), Record(1.5, 10, 40, 1, None, 1.5, 1.6, 0.5))
    return SharedRuns(["a<b", "later"], {"a<b": run(ASYNCHRONOUS)}, [Slice("a<b", 10, 1.5, records)], "time is up")


@pytest.fixture
def plans(tmp_path: Path) -> paceline.Plans:
    (tmp_path / "small.toml").write_text(SHAPE)
    return paceline.plan(tmp_path / "small.toml", cluster="1x4 A100-80GB")


class Cells(HTMLParser):
    """Texts of a table's cells; every element that is opened has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.cells = list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


# --------------------------------------------------------------------------------------------------------- at a prompt


def test_a_run_is_one_line_without_its_tensors() -> None:
    found = replace(run(ASYNCHRONOUS), state={"weight": torch.ones(1000, 1000)})
    assert repr(found) == (
        "<Run digits, replicas=8 aggregation=asynchronous, engine=local: 8,400 updates in 20 s, "
        "test accuracy 96.51%, test loss 0.1304, training loss 0.1238>"
    )


def test_a_run_without_scores_or_cut_short_says_so() -> None:
    assert repr(replace(run(), summary={"updates": 3, "seconds": 0.25, "interrupted": True})).endswith(
        "3 updates in 250 ms, interrupted>"
    )
    assert repr(replace(run(), summary={})).endswith(": 0 updates>")


def test_a_comparison_is_a_line_for_each_strategy() -> None:
    head, *lines = repr(comparison(3)).splitlines()
    assert head == "<Comparison digits on the local engine, 3 strategies"
    assert [line.split(":")[0].strip() for line in lines[:2]] == list(comparison(1).runs)[:2]
    assert all("updates in 20 s, test accuracy 9" in line and "(mean of 3 rounds)" in line for line in lines)
    assert "rounds" not in repr(comparison(1))


def test_an_interrupted_comparison_has_a_short_form_too() -> None:
    empty = Comparison({ASYNCHRONOUS: [], SWITCHING: []}, ASYNCHRONOUS, "SIGINT")
    assert repr(empty).startswith("<Comparison without a complete run, 2 strategies")
    assert "<table>" in empty._repr_html_()


def test_plans_are_the_best_that_differ_and_a_plan_is_one_line(plans: paceline.Plans) -> None:
    lines = repr(plans).splitlines()
    assert lines[0] == f"<Plans {plans.name} on 1x4 A100-80GB, objective throughput: {len(plans)} plans"
    assert lines[1].strip().removesuffix(">") == plans.text().splitlines()[0]
    assert repr(plans.best) == f"<Plan {plans.best.strategy}: {plans.best.figures()}>"


def test_shared_runs_are_a_line_for_each_job() -> None:
    assert repr(shared()).splitlines()[0] == "<SharedRuns 2 jobs, 1 slices, 1.5 s of training; time is up"
    assert repr(shared()).splitlines()[1].startswith("  a<b: Run digits, ")
    assert repr(shared()).splitlines()[2] == "  later: no slice>"


# -------------------------------------------------------------------------------------------------------- in a notebook


def test_tables_have_the_figures_and_are_escaped(plans: paceline.Plans) -> None:
    table = Cells(run(ASYNCHRONOUS)._repr_html_().partition("<div")[0]).cells
    assert dict(zip(table[::2], table[1::2], strict=True)) == {
        "strategy": ASYNCHRONOUS,
        "engine": "local",
        "updates": "8,400",
        "seconds": "20.00",
        "test accuracy": "96.51%",
        "test loss": "0.1304",
        "training loss": "0.1238",
    }
    of_jobs = shared()._repr_html_()
    assert "a<b" in Cells(of_jobs).cells
    assert "a<b" not in of_jobs
    text = comparison(2)._repr_html_().partition("<div")[0]
    assert {"synchronous", "asynchronous", "updates", "8,400"} <= set(Cells(text).cells)
    assert str(plans.best.strategy) in Cells(plans._repr_html_()).cells


def test_tables_have_the_curves_where_there_are_any() -> None:
    assert run()._repr_html_().count("<svg") == comparison(2)._repr_html_().count("<svg") == 1
    assert "<svg" not in replace(run(), history=run().history[:1])._repr_html_()


# -------------------------------------------------------------------------------------------------------------- figures


def test_a_run_is_drawn_over_time_and_over_updates() -> None:
    found = run(ASYNCHRONOUS)
    rows = [record.row() for record in found.history]
    axes = found.plot().axes
    assert [each.get_ylabel() for each in axes[::2]] == ["Test accuracy, %", "Test loss", "Training loss"]
    assert (axes[-2].get_xlabel(), axes[-1].get_xlabel()) == ("training time, s", "updates of A")
    for column, axis in enumerate(("time_s", "updates")):
        [line] = axes[2 + column].lines
        assert list(line.get_xdata()) == [row[axis] for row in rows]
        assert list(line.get_ydata()) == [row["test_loss"] for row in rows]
    virtual = replace(found, engine="virtual", history=[replace(r, test_accuracy=None) for r in found.history])
    assert [each.get_ylabel() for each in virtual.plot().axes[::2]] == ["Test loss", "Training loss"]
    assert virtual.plot().axes[-2].get_xlabel() == "virtual time, s"


def test_a_comparison_has_a_line_for_each_strategy_in_a_band_of_its_rounds() -> None:
    figure = comparison(3).plot()
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["synchronous", "asynchronous", "smooth-switch:every=300"]
        assert len(axes.collections) == 3
    [legend] = figure.legends
    assert len(legend.get_texts()) == 3
    assert not any(axes.collections for axes in comparison(1).plot().axes), "one round has no spread"


def test_no_window_is_opened_and_a_notebook_shows_the_figure() -> None:
    code = (
        "import sys; from tests.report.plausible import run; figure = run().plot(); "
        "print('matplotlib.pyplot' in sys.modules, figure._repr_svg_().startswith('<svg'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_without_matplotlib_a_figure_says_what_to_install_and_tables_have_none(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for each, name in ((run(), "run"), (comparison(1), "comparison")):
        message = rf"{name}\.plot\(\) needs matplotlib, .* run: pip install 'paceline\[plots\]'"
        with pytest.raises(InputError, match=message):
            each.plot()
        assert "<svg" not in each._repr_html_()
        assert "<table>" in each._repr_html_()
