"""What a reader is invited to run, run: the programs in the README and in docs/, the examples, the commands."""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from paceline import Strategy
from paceline.aggregation import Aggregation, registered
from paceline.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [
    pytest.param(code, int(ranks or 1), id=f"{page.name}-{number}")
    for page in PAGES
    for number, (ranks, code) in enumerate(
        re.findall(r"^```python(?: ranks=(\d+))?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    )
]
# The README's program, and below it what it prints.
[(TEN_LINES, PRINTED)] = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", README, re.M | re.S)
# Those with a number, and branches, run in test_examples.py.
EXAMPLES = sorted({*(ROOT / "examples").glob("[a-z]*.py")} - {ROOT / "examples" / "inception_branches.py"})


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(text: str) -> list[list[str]]:
    """Every ``paceline ...`` line of a page or a recipe, as words."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = re.findall(r"^\s+(?:\$\(BIN\)/)?paceline (.*?)(?:\s+#.*)?$", joined, re.M)
    return [shlex.split(line) for line in lines]


@functools.cache
def help_of(*command: str) -> str:
    """What a command prints with --help."""
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


COMMANDS = [words for page in PAGES for words in commands(page.read_text(encoding="utf-8"))] + commands(MAKEFILE)


def shape(table: str) -> str:
    """The words and columns of what a program printed, whose figures differ from run to run."""
    return re.sub(r"─+|[+-]?\d[\d,.]*", "#", " ".join(table.split()))


@pytest.mark.parametrize(("code", "ranks"), PROGRAMS)
def test_programs_in_the_text_run_as_they_stand(code: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    output = run(sys.executable, *torchrun, "program.py", folder=tmp_path)
    if code == TEN_LINES:
        assert shape(output) == shape(PRINTED)


def test_the_readme_program_is_ten_lines() -> None:
    assert len([line for line in TEN_LINES.splitlines() if line.strip()]) <= 10


def test_what_the_readme_program_prints_has_updates_and_a_spread() -> None:
    titles, *rows = PRINTED.splitlines()[3:]
    assert "updates" in titles.split()
    assert len(rows) == 3
    assert all("±" in row for row in rows[1:])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_from_anywhere(example: Path, tmp_path: Path) -> None:
    assert run(sys.executable, example, folder=tmp_path).strip()


def test_a_policy_of_a_programs_own_file_has_its_name_on_the_command_line(tmp_path: Path) -> None:
    program = f"{ROOT / 'examples' / 'drop_stale.py'}:program"
    words = ("--engine", "virtual", "--steps", "4", "--strategy", "replicas=2 aggregation=drop-stale:bound=2")
    main = "from paceline.cli.main import main; main()"
    assert "drop-stale:bound=2" in run(sys.executable, "-c", main, "train", program, *words, folder=tmp_path)


def test_the_readme_names_two_make_targets_that_exist() -> None:
    named = re.findall(r"^    make (\w+)", README, re.M)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{target}:", MAKEFILE, re.M) for target in named)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_commands_in_the_text_have_only_known_options_and_strategies(words: list[str]) -> None:
    command, path = get_command(app).commands[words[0]], words[:1]
    if hasattr(command, "commands"):  # a group, whose default is "list"
        path = [words[0], words[1] if words[1] in command.commands else "list"]
    text = help_of(*path)
    for word, value in zip(words, [*words[1:], ""], strict=True):
        assert not word.startswith("--") or word in text, f"{word} is no option of {words[0]}"
        if word in ("--strategy", "--baseline") and "drop-stale" not in value and value != "auto":
            Strategy.parse(value)


def test_files_that_the_readme_says_to_read_are_there() -> None:
    tour = README.split("## Read the code in this order")[1]
    folder = ""
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", tour):
        folder = name[: name.rfind("/") + 1] if name.startswith("src/") else folder
        path = name if name.startswith("src/") else (folder + name if not name.endswith("/") else f"{folder}../{name}")
        assert (ROOT / path).exists(), path


def test_every_policy_is_in_the_table_and_in_the_guide() -> None:
    guide = (ROOT / "docs" / "choosing-a-policy.md").read_text(encoding="utf-8")
    for name in registered(Aggregation):
        assert name in README, name
        assert name in guide, name
