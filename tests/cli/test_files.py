"""``paceline trace`` and ``paceline report``: which files they read and write."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SPANS = ["a span", "another"]


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with two spans, and drawings that name what they were given."""

    def write(path: Path, spans: list[str]) -> None:
        path.write_text(f"perfetto of {len(spans)}", encoding="utf-8")

    def drawing(name: str) -> Callable[..., str]:
        return lambda spans, start_s, end_s: f"{name} of {len(spans)} from {start_s} to {end_s}\n"

    monkeypatch.setattr(import_module("paceline.run"), "load", lambda path: SimpleNamespace(spans=list(SPANS)))
    monkeypatch.setattr(import_module("paceline.trace.swimlane"), "svg", drawing("svg"))
    monkeypatch.setattr(import_module("paceline.trace.swimlane"), "text", drawing("text"))
    monkeypatch.setattr(import_module("paceline.trace.perfetto"), "write_perfetto", write)


@pytest.mark.usefixtures("drawings")
def test_trace_without_options_prints_the_swimlanes(invoke: Any) -> None:
    assert invoke("trace", "runs/a").stdout == "text of 2 from None to None\n"


@pytest.mark.usefixtures("drawings")
def test_trace_draws_the_stretch_asked_for(invoke: Any, tmp_path: Path) -> None:
    stretch, svg = ("--start", "0.5", "--end", "2"), tmp_path / "svg"
    assert invoke("trace", "runs/a", *stretch).stdout == "text of 2 from 0.5 to 2.0\n"
    assert invoke("trace", "runs/a", *stretch, "--svg", svg).exit_code == 0
    assert svg.read_text(encoding="utf-8") == "svg of 2 from 0.5 to 2.0\n"


@pytest.mark.usefixtures("drawings")
@pytest.mark.parametrize("wanted", [("svg",), ("perfetto",), ("svg", "perfetto")])
def test_trace_writes_the_files_asked_for_and_prints_nothing(
    invoke: Any, tmp_path: Path, wanted: tuple[str, ...]
) -> None:
    words = [word for name in wanted for word in (f"--{name}", str(tmp_path / name))]
    done = invoke("trace", "runs/a", *words)
    assert (done.exit_code, done.stdout) == (0, "")
    written = {path.name: path.read_text(encoding="utf-8").split(" from ")[0] for path in tmp_path.iterdir()}
    assert written == {name: f"{name} of 2" for name in wanted}


@pytest.mark.usefixtures("drawings")
def test_trace_json_says_what_was_written(invoke: Any, tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    done = invoke("trace", "runs/a", "--svg", svg, "--json")
    assert json.loads(done.stdout) == {"spans": 2, "svg": str(svg), "perfetto": None}


def test_trace_refuses_a_run_without_spans(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("paceline.run"), "load", lambda path: SimpleNamespace(spans=[]))
    done = invoke("trace", "runs/a")
    assert (done.exit_code, done.stderr) == (2, "error: runs/a holds no spans; record the run with --trace\n")


@pytest.mark.usefixtures("drawings")
@pytest.mark.parametrize("option", ["--svg", "--perfetto"])
def test_trace_refuses_a_file_in_a_folder_that_is_not_there(invoke: Any, tmp_path: Path, option: str) -> None:
    done = invoke("trace", "runs/a", option, tmp_path / "none" / "file")
    assert done.exit_code == 2
    assert f"there is no folder {tmp_path / 'none'}" in done.stderr


def test_report_lies_in_the_first_folder_by_default(invoke: Any, calls: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    done = invoke("report", first, second)
    assert calls.of("write_report") == (([first, second], first / "report.html"), {})
    assert done.stdout == f"Report: {first / 'report.html'}\n"


def test_report_goes_where_it_is_told(invoke: Any, calls: Any, tmp_path: Path) -> None:
    done = invoke("report", tmp_path / "a", "--html", tmp_path / "page.html", "--json")
    assert calls.of("write_report")[0][1] == tmp_path / "page.html"
    assert json.loads(done.stdout) == {"html": str(tmp_path / "page.html")}


def test_report_needs_a_folder(invoke: Any, calls: Any) -> None:
    assert invoke("report").exit_code == 2
    assert calls.made == []
