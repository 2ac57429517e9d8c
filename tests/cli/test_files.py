"""``paceline trace`` and ``paceline report``: which files they read and write."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.schedule import StageTimes, parse, simulate
from paceline.strategy import Strategy

SPANS = ["a span", "another"]


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with two spans, and drawings that name what they were given."""

    def write(path: Path, spans: list[str], ideal: tuple[str, ...]) -> None:
        assert ideal == ()
        path.write_text(f"perfetto of {len(spans)}", encoding="utf-8")

    def drawing(name: str) -> Callable[..., str]:
        return lambda spans, start_s, end_s: f"{name} of {len(spans)} from {start_s} to {end_s}\n"

    loaded = SimpleNamespace(spans=list(SPANS), strategy="replicas=2", summary={})
    monkeypatch.setattr(import_module("paceline.run"), "load", lambda path: loaded)
    monkeypatch.setattr(import_module("paceline.trace.svg"), "swimlanes_svg", drawing("svg"))
    monkeypatch.setattr(import_module("paceline.trace.text"), "swimlanes_text", drawing("text"))
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


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two stages, two steps of it recorded."""
    order, times = parse("gpipe"), StageTimes.equal(2, forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
    spans = [
        replace(s, step=step, start_ns=s.start_ns + step * 10**8, end_ns=s.end_ns + step * 10**8)
        for step in (1, 2)
        for s in simulate(order, times, 2, 3)
    ]
    strategy = Strategy(stages=2, schedule="gpipe", micro_batches=3)
    loaded = SimpleNamespace(spans=spans, strategy=strategy, summary={"peak_saved_bytes": [2000, 1000]})
    monkeypatch.setattr(import_module("paceline.run"), "load", lambda path: loaded)


@pytest.mark.usefixtures("pipeline")
def test_trace_of_a_pipeline_is_a_step_beside_its_ideal(invoke: Any) -> None:
    lines = invoke("trace", "runs/a", "--step", "2").stdout.splitlines()
    assert lines[1] == "measured, step 2: 12 ms"
    assert lines[4] == "ideal, gpipe with 3 micro-batches: 12 ms"
    assert lines[2:4] == lines[5:7]
    assert lines[2].startswith("stage 0 |F0---")
    assert len(lines[2]) == 160 - 16 + len("stage 0 ||")
    assert lines[-2].split() == ["1", "75.0", "%", "25.0", "%", "0", "ns", "1", "kB"]


@pytest.mark.usefixtures("pipeline")
def test_trace_json_of_a_pipeline_has_its_figures(invoke: Any) -> None:
    told = json.loads(invoke("trace", "runs/a", "--json").stdout)
    assert told["spans"] == 24
    found = told["pipeline"]
    assert (found["step"], found["steps"], found["measured_over_ideal"]) == (1, 2, 1.0)
    assert found["stages"][0] == {
        "stage": 0,
        "shard": 0,
        "utilisation": 0.75,
        "bubble": 0.25,
        "exposed_communication_s": 0.0,
        "peak_saved_bytes": 2000,
    }


@pytest.mark.usefixtures("pipeline")
def test_trace_writes_a_pipelines_step_and_its_ideal(invoke: Any, tmp_path: Path) -> None:
    svg, perfetto = tmp_path / "a.svg", tmp_path / "a.json"
    done = invoke("trace", "runs/a", "--svg", svg, "--perfetto", perfetto, "--step", "2")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "measured, step 2: 12 ms" in svg.read_text(encoding="utf-8")
    events = json.loads(perfetto.read_text(encoding="utf-8"))["traceEvents"]
    ideal = next(event["pid"] for event in events if event.get("args") == {"name": "ideal"})
    assert len([event for event in events if event["ph"] == "X"]) == 24 + 12
    # The second step begins 100 ms after the first.
    assert min(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == ideal) == 100_000


@pytest.mark.usefixtures("pipeline")
def test_a_stretch_of_a_pipelines_run_is_drawn_as_any_other(invoke: Any) -> None:
    assert "replica 0.1.0 |" in invoke("trace", "runs/a", "--end", "0.05").stdout


@pytest.mark.usefixtures("pipeline")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "2", "--start", "0.1"), "--step 2 is one step, --start and --end are a part"),
        (("--step", "7"), "step=7, but the run has steps 1 to 2; write step=1"),
    ],
)
def test_trace_refuses_steps_that_can_not_be_shown(invoke: Any, words: tuple[str, ...], said: str) -> None:
    done = invoke("trace", "runs/a", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.usefixtures("drawings")
def test_trace_refuses_a_step_of_what_is_no_pipeline(invoke: Any) -> None:
    done = invoke("trace", "runs/a", "--step", "2")
    assert done.exit_code == 2
    assert "replicas=2 has no stages, or no whole step was recorded; leave --step out" in done.stderr


@pytest.mark.usefixtures("drawings")
@pytest.mark.parametrize("option", ["--svg", "--perfetto"])
def test_a_drawing_goes_into_a_file(invoke: Any, tmp_path: Path, option: str) -> None:
    done = invoke("trace", "runs/a", option, tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} {tmp_path} is a folder; write the path of a file" in done.stderr


@pytest.mark.usefixtures("drawings")
def test_a_drawing_that_the_disk_has_no_room_for(invoke: Any) -> None:
    done = invoke("trace", "runs/a", "--svg", "/dev/full")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--svg /dev/full can't be written: No space left on device" in done.stderr


def test_a_report_of_no_folder_says_so(invoke: Any, tmp_path: Path) -> None:
    done = invoke("report", tmp_path / "nothing")
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {tmp_path / 'nothing'} is no folder; write the path of a saved run\n",
    )


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
