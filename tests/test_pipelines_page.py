"""docs/pipelines.md says what the schedules do: its drawings are theirs, and it leaves none out."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.core.mesh import StageReplicas
from paceline.schedule import draw, names, parse
from paceline.strategy import Strategy

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "pipelines.md").read_text(encoding="utf-8")
TURNS = re.findall(r"^```text (\S+) stages=\[([\d,]+)\] micro_batches=(\d+)\n(.*?)\n```$", PAGE, re.M | re.S)
DRAWINGS = re.findall(r"^```text (\S+) stages=(\d+) micro_batches=(\d+)\n(.*?)\n```$", PAGE, re.M | re.S)


@pytest.mark.parametrize(("schedule", "workers", "micro_batches", "drawn"), DRAWINGS, ids=[d[0] for d in DRAWINGS])
def test_each_drawing_is_what_the_schedule_does(schedule: str, workers: str, micro_batches: str, drawn: str) -> None:
    assert draw(parse(schedule), int(workers), int(micro_batches)) == drawn


def test_the_drawing_of_columns_that_take_turns() -> None:
    ((schedule, copies, micro_batches, drawn),) = TURNS
    columns = StageReplicas(tuple(map(int, copies.split(","))))
    assert draw(parse(schedule), len(columns.copies), int(micro_batches), columns) == drawn
    assert "lasts 3m + 6 units, with one worker at each stage 6m + 1" in PAGE  # tests/schedule/test_turns.py


def test_every_schedule_is_explained_and_all_but_one_are_drawn() -> None:
    ours = {name for name in names() if parse(name).__module__.startswith("paceline.")}
    assert ours <= set(re.findall(r"^\| `([\w-]+)(?::chunks=v)?`[^|]*\| [^|]+\| [^|]+\|$", PAGE, re.M))
    assert ours - {drawing[0] for drawing in DRAWINGS} == {"pipedream-2bw"}


def test_options_that_it_names_are_those_of_a_strategy() -> None:
    named = set(re.findall(r"`(\w+)=[^`]*`", PAGE)) - {"engine", "reduction", "clip_norm", "on_nonfinite"}
    assert named <= set(Strategy.__dataclass_fields__)
    assert {"stages", "micro_batches", "recompute", "cuts", "batchnorm", "stage_memory_bytes", "schedule"} <= named


def test_the_picture_is_of_the_program_that_the_page_names() -> None:
    root = ElementTree.fromstring((DOCS / "pipeline.svg").read_text(encoding="utf-8"))
    assert "ideal, 1f1b with 8 micro-batches" in root.attrib["aria-label"]
    assert '--strategy "stages=2 micro_batches=8"' in PAGE
