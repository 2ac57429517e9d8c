"""The eight programs of examples/: short, each a few lines from the one before, and all of them train."""

import difflib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROGRAMS = sorted(EXAMPLES.glob("[0-9]_*.py"))
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")

LIKE_ONE_PROCESS = {"1_one_process", "2_data", "3_pipeline", "4_tensor", "5_hybrid", "8_per_stage_replication"}
"""Synchronous: what they print is what one process prints."""


def strategy(program: Path) -> str:
    [found] = re.findall(r'^run = paceline\.train\(\s*program,\s*"(.*?)"', program.read_text(encoding="utf-8"), re.M)
    return str(found)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    return printed(PROGRAMS[0], tmp_path_factory.mktemp("first"))


def printed(program: Path, folder: Path) -> str:
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_trains_and_the_synchronous_ones_alike(program: Path, first: str, tmp_path: Path) -> None:
    said = first if program == PROGRAMS[0] else printed(program, tmp_path)
    found = re.fullmatch(r"test loss (\d\.\d{4}), accuracy (\d+\.\d)%\n", said)
    assert found is not None, said
    assert float(found[1]) < 1.8  # 2.3 is that of who knows nothing of ten classes
    assert program.stem not in LIKE_ONE_PROCESS or said == first


@pytest.mark.timeout(240)
def test_branches_are_side_by_side(tmp_path: Path) -> None:
    said = printed(EXAMPLES / "inception_branches.py", tmp_path)
    lanes = re.findall(r"^stage (\d) \|(.*)\|$", said, re.M)
    assert [int(stage) for stage, _ in lanes] == [*range(9), *range(9)]
    begins = [lane.index("F0") for _, lane in lanes[:9]]
    assert (
        begins[0] < begins[1] == begins[2] == begins[4] == begins[6] < begins[3] == begins[5] == begins[7] < begins[8]
    )
    assert "measured / ideal: 1.00" in said


def test_each_is_short_and_a_few_lines_from_the_one_before() -> None:
    texts = [program.read_text(encoding="utf-8").splitlines() for program in PROGRAMS]
    assert [int(program.stem[0]) for program in PROGRAMS] == list(range(1, len(PROGRAMS) + 1))
    assert all(len(text) <= 60 for text in texts)
    for before, text in itertools.pairwise(texts):
        added = [line for line in difflib.ndiff(before, text) if line.startswith("+ ")]
        assert 1 <= len(added) <= 6, added


def test_the_page_has_each_with_its_strategy() -> None:
    rows = re.findall(r"^\| \[(\S+)\.py\]\(\1\.py\) \| `(.*?)` \|", README, re.M)
    assert rows == [(program.stem, strategy(program)) for program in PROGRAMS]
