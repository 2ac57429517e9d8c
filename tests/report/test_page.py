"""The page: complete, self-contained, well-formed, and safe against what users name things."""

import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.comparison import Comparison
from paceline.core.errors import InputError
from paceline.core.records import STATISTICS, ReplicaExit
from paceline.report import write_report
from paceline.report.inputs import Source, sections
from paceline.report.page import page
from paceline.schedule import StageTimes, parse, simulate
from paceline.strategy import Strategy
from tests.report.plausible import ASYNCHRONOUS, SWITCHING, SYNCHRONOUS, comparison, run

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags nest; collects text, headings and all that could reach outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def write(tmp_path: Path, *sources: Source) -> str:
    write_report(sources, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_traced_comparison_shows_everything(tmp_path: Path) -> None:
    found = Page(write(tmp_path, comparison()))
    parts = ["Results", "Over time", "Staleness and utilisation", "Swimlanes", "Notes"]
    assert found.headings == ["Paceline report", "digits on the local engine", *parts]
    # Four curves, two figures of bars, three swimlanes.
    assert found.tags.count("svg") == 9
    titles = ["Test accuracy, %", "Test loss", "Train loss", "K: gradients", "Busy time of each worker, %"]
    for words in (*titles, "9 runs under 3 strategies.", SWITCHING, "baseline", "training time, s", "replica 7"):
        assert words in found.text
    assert "smooth-switch:every=300, round 2: replica 3 left after 7.40 s: killed by SIGKILL." in found.text
    assert "least to the largest" in found.text


@pytest.fixture(scope="module")
def of_one_round(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with all kinds of figures."""
    return write(tmp_path_factory.mktemp("page"), comparison(rounds=1))


def test_the_page_reaches_nothing_outside_itself(of_one_round: str) -> None:
    found = Page(of_one_round)
    assert found.links == []
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", of_one_round))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"@import|url\((?!#)", of_one_round)


def test_each_figure_is_well_formed(of_one_round: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", of_one_round, flags=re.DOTALL)
    assert len(figures) == 9
    for svg in figures:
        ElementTree.fromstring(svg)
        assert "aria-label" in svg


def test_a_saved_run_alone(tmp_path: Path) -> None:
    run(SYNCHRONOUS, traced=False).save(tmp_path / "a")
    found = Page(write(tmp_path, tmp_path / "a"))
    assert found.headings == [
        "Paceline report",
        "digits on the local engine",
        "Results",
        "Over time",
        "Staleness and utilisation",
    ]
    assert "1 run under 1 strategy." in found.text
    for words in ("difference", "baseline", "±", "rounds,", "Difference"):
        assert words not in found.text


def test_several_sources_are_several_sections(tmp_path: Path) -> None:
    virtual = replace(run(ASYNCHRONOUS), engine="virtual", program_name="synthetic")
    found = Page(write(tmp_path, comparison(rounds=1, traced=False), virtual))
    assert [h for h in found.headings if "engine" in h] == [
        "digits on the local engine",
        "synthetic on the virtual engine",
    ]
    assert "virtual time, s" in found.text


def test_equal_sources_make_equal_pages(of_one_round: str, tmp_path: Path) -> None:
    assert write(tmp_path, comparison(rounds=1)) == of_one_round


def test_dependencies_of_parts_are_explained(tmp_path: Path) -> None:
    summary = run().summary | {"notes": {"part_dependencies": "0-1 0>2"}}
    text = Page(write(tmp_path, replace(run(traced=False), summary=summary))).text
    assert "dependencies among the model's parts (0-1: part 1 needs what part 0 makes" in text
    assert "): 0-1 0>2" in text


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>&$x_1$'
    summary = run().summary | {"notes": {evil: evil}, "interrupted": True, "nonfinite": 3}
    made = replace(
        run(), program_name=evil, strategy=f"aggregation={evil}", summary=summary, left=[ReplicaExit(0, evil, 1.0)]
    )
    found = Page(
        write(tmp_path, Comparison({f"aggregation={evil}": [made], SYNCHRONOUS: [run(SYNCHRONOUS)]}, SYNCHRONOUS))
    )
    assert "script" not in found.tags
    assert found.text.count("alert(") > 5
    assert "$x_1$" in found.text
    for words in ("interrupted after 20.00 s", "3 gradients were not finite", "replica 0 left after 1.00 s"):
        assert words in found.text


@pytest.mark.parametrize(
    "changes",
    [
        {"history": []},
        {"summary": {}},
        {"history": [replace(record, test_loss=None, test_accuracy=None) for record in run().history]},
        {"history": [replace(record, test_loss=float("nan"), train_loss=float("inf")) for record in run().history]},
        {"history": [replace(record, train_loss=-1.0) for record in run().history]},
        {"history": run().history[:1]},
    ],
)
def test_whatever_is_missing_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    for other in ([], [run(ASYNCHRONOUS)]):
        Page(write(tmp_path, replace(run(), **changes), *other))
    assert "nan" not in Page(write(tmp_path, replace(run(), **changes))).text.lower()


def test_without_test_data_there_is_no_test_figure(tmp_path: Path) -> None:
    history = [replace(record, test_loss=None, test_accuracy=None) for record in run().history]
    summary = {key: None if key.startswith("test_") else value for key, value in run().summary.items()}
    found = Page(write(tmp_path, replace(run(), history=history, summary=summary)))
    assert "Train loss" in found.words
    assert not {"test loss", "Test loss", "test accuracy, %", "Test accuracy, %"} & set(found.words)


def test_a_loss_over_decades_has_a_logarithmic_axis() -> None:
    steep = [replace(record, train_loss=10.0 ** (3 - record.time_s / 4)) for record in run().history]
    flat = [replace(record, train_loss=3.0 - record.time_s / 10) for record in steep]
    texts = [page(sections([replace(run(), history=history, spans=[])])) for history in (steep, flat)]
    assert [">0.01</text>" in text for text in texts] == [True, False]
    assert "mathdefault" not in texts[0]


def test_work_that_is_unknown_is_not_drawn_as_none(tmp_path: Path) -> None:
    unknown, half = (run().summary | {"utilisation": shares} for shares in ([None, None], [None, 0.5]))
    assert "Busy time" not in Page(write(tmp_path, replace(run(traced=False), summary=unknown))).text
    assert "mean 50%" in Page(write(tmp_path, replace(run(traced=False), summary=half))).text


def test_many_workers_and_long_tails_stay_small(tmp_path: Path) -> None:
    summary = run().summary | {"utilisation": [0.5] * 1000, "staleness": {str(s): 1 for s in range(0, 5000, 7)}}
    assert len(write(tmp_path, replace(run(traced=False), summary=summary))) < 700_000


def test_what_was_there_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(InputError):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"
    assert write(tmp_path, run()).startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_page_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be written"):
        write_report([run()], tmp_path / "nowhere" / "report.html")


def test_a_pipeline_is_drawn_as_a_step_beside_its_ideal(tmp_path: Path) -> None:
    order, times = parse("1f1b"), StageTimes.equal(2, forward=1e-3, backward_input=1e-3, backward_weight=1e-3)
    pipeline = replace(run(), strategy=Strategy(stages=2, micro_batches=4), spans=simulate(order, times, 2, 4))
    found = Page(write(tmp_path, pipeline))
    for words in ("Swimlanes", "Pipelines: one step", "measured, step 1: 15 ms", "ideal, 1f1b with 4 micro-batches"):
        assert words in found.text
    assert "What each worker did, from the middle" not in found.text


def test_pipelines_and_others_share_a_page(tmp_path: Path) -> None:
    spans = simulate(parse("1f1b"), StageTimes.equal(2, forward=1e-3), 2, 4)
    pipeline = replace(run(), strategy=Strategy(stages=2, micro_batches=4), spans=spans)
    broken = replace(run(), strategy=Strategy(stages=2, micro_batches=8), spans=spans[:1])
    found = Page(write(tmp_path, pipeline, run(), broken))
    assert "Pipelines: one step" in found.text
    assert "What each worker did, from the middle" in found.text
    assert found.tags.count("svg") == 4 + 2 + 3


def test_where_gradients_were_looked_at_the_page_tells_of_batch_sizes(tmp_path: Path) -> None:
    found = run(SYNCHRONOUS)
    assert "Noise scale" not in Page(write(tmp_path, found)).text
    told = [dict.fromkeys(STATISTICS, 0.5 * k if k else None) for k in range(len(found.history))]
    history = [replace(record, statistics=row) for record, row in zip(found.history, told, strict=True)]
    summary = found.summary | {"noise_scale_mean": 511.6, "noise_scale_error": 0.04}
    text = Page(write(tmp_path, replace(found, history=history, summary=summary))).text
    for title in ("Noise scale, samples", "Statistical efficiency", "Goodput"):
        assert title in text
    assert "useful batch ≤ 512; beyond it each doubling wastes 33 %" in text
