"""docs/planning.md: its files are read, its commands run, and what it says of options and words is so."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.planner.multi_job import MOST_MODELS, SHARES
from paceline.planner.search.candidates import MAX_UNEVEN_STAGES, MAX_UNEVEN_WORKERS
from paceline.planner.search.objective import FEWER, MORE, Objective, Objectives
from paceline.schedule import names, parse

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "planning.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```toml (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^    (paceline plan .*)$", PAGE, re.M)]
SHAPES = [command for command in COMMANDS if ".toml" in command]


@pytest.mark.parametrize("command", SHAPES)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output


def test_the_words_that_are_explained_are_those_that_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    printed = CliRunner().invoke(app, shlex.split(SHAPES[2])[1:]).stdout
    explained = [
        word.strip() for row in re.findall(r"^\| ([a-z/, ]+) \| ", PAGE, re.M)[1:12] for word in row.split(",")
    ]
    assert "first bottleneck" in explained
    assert [word for word in explained if word not in printed and word not in ("claim",)] == []


def test_objectives_are_all_there_are() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \| the ", PAGE, re.M)) == set(get_args(Objective))


def test_numbers_are_those_of_the_code() -> None:
    assert (2**FEWER, 2**MORE) == (16, 64)
    assert "from a sixteenth to 64 times" in PAGE
    assert f"2 to {Objectives().most_chunks} chunks" in PAGE
    assert f"best {Objectives().simulated} are simulated" in PAGE
    assert f"up to {MAX_UNEVEN_STAGES} stages with {MAX_UNEVEN_WORKERS} workers" in PAGE
    assert (MOST_MODELS, f"up to {SHARES} equal shares" in PAGE) == (6, True)
    ours = {each for each in names() if parse(each).flushes and each != "sequential"}
    assert all(f"`{each}`" in PAGE for each in ours if parse(each).__module__.startswith("paceline."))
