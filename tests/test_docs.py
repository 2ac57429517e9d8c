"""The documentation as a site: links and anchors, what the reference has, notebooks, and that it builds."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline
from paceline.core.records import RECORD_FIELDS, STATISTICS
from paceline.datasets import load_program

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for top in ("docs", "examples", "benchmarks") for p in (ROOT / top).rglob("*.md"))]
)
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((DOCS / "reference" / "api").glob("*.md")))
JSON_PAGE = (DOCS / "reference" / "json.md").read_text("utf-8")
RESULTS_PAGE = (DOCS / "results.md").read_text("utf-8")

# What a reader imports besides ``paceline`` itself.
PACKAGES = ("aggregation", "clock", "compression", "datasets", "optim", "parameter_scheduling", "reduction", "schedule")
NEEDED = ("sphinx", "furo", "myst_nb")


def cells(notebook: Path, kind: str) -> list[str]:
    """The text of a notebook's cells of one kind."""
    return [
        "".join(cell["source"])
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code, or the text of a notebook."""
    if page.suffix == ".ipynb":
        return "\n\n".join(cells(page, "markdown"))
    return re.sub(r"^(`{3,})[^`\n]*\n.*?^\1$", "", page.read_text("utf-8"), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    seen: dict[str, int] = {}
    found = set[str]()
    for heading in re.findall(r"^#{1,4} +(.+?) *$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def entries(page: Path) -> list[Path]:
    """What the toctrees of a page lead to, without suffix."""
    text, found = page.read_text("utf-8"), []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        found += [(page.parent / line).resolve() for line in lines if "*" not in line]
    return found


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c?\n[x](gone.md) [y](#a-b-c) [z](#a-c) [w](page.md#a-b-c)\n```\n[v](code.md)\n```\n", "utf-8"
    )
    assert broken(page) == ["gone.md", "#a-c"]


def test_every_page_is_in_a_toctree() -> None:
    reached = {DOCS / "index"}
    for _ in range(5):  # toctrees are nested no deeper
        reached |= {
            entry for page in reached if page.with_suffix(".md").exists() for entry in entries(page.with_suffix(".md"))
        }
    pages = {page.with_suffix("") for page in (*DOCS.rglob("*.md"), *NOTEBOOKS)}
    missing = sorted(str(page.relative_to(ROOT)) for page in pages - reached)
    assert not missing, f"add {missing} to the toctree and the table of docs/how-to, docs/explained or docs/reference"


@pytest.mark.parametrize("name", [name for name in paceline.__all__ if name != "__version__"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"^\.\. auto\w+:: paceline\.{name}$", REFERENCE, re.M), (
        f"add `.. autoclass:: paceline.{name}`, or autofunction, to a page of docs/reference/api"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_public_package_is_in_the_reference(package: str) -> None:
    module = import_module(f"paceline.{package}")
    every = re.findall(r"^\.\. auto\w+:: (\S+)$", REFERENCE, re.M)
    optional = "paceline.integrations."  # their packages may be absent
    documented = {id(resolved(name)) for name in every if not name.startswith(optional)}
    constants = {"PROGRAMS"}  # in the text of `paceline train --help`
    missing = [n for n in module.__all__ if n not in constants and id(getattr(module, n)) not in documented]
    assert not missing, f"add paceline.{package}: {missing} to a page of docs/reference/api"


def resolved(name: str) -> object:
    """What a dotted name of the reference is; AttributeError if it is nothing."""
    value: object = paceline
    for part in name.split(".")[1:]:
        try:
            value = getattr(value, part)
        except AttributeError:
            value = import_module(f"{value.__name__}.{part}")  # type: ignore[attr-defined]
    return value


def keys(value: object) -> set[str]:
    """All keys of a JSON object, but those of ``notes``, of counts by staleness, and those that are strategies."""
    if isinstance(value, dict):
        inner = (keys(part) for key, part in value.items() if key not in ("notes", "staleness"))
        return {key for key in value if not key.startswith("replicas=")}.union(*inner)
    return set[str]().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_json_page_has_every_key() -> None:
    program = load_program("digits", data=None, seed=0, batch_size=None)
    real = paceline.train(program, "replicas=1", steps=2, progress=False).to_json()
    compared = paceline.compare(
        program, ["replicas=1", "replicas=2"], engine="virtual", steps=2, rounds=2, progress=False
    ).to_json()
    missing = {key for key in keys(real) | keys(compared) if f"`{key}`" not in JSON_PAGE + RESULTS_PAGE}
    assert not missing, f"docs/reference/json.md or docs/results.md lacks {sorted(missing)}"


def section(title: str) -> str:
    """A section of the page on results."""
    return re.split(r"^## ", RESULTS_PAGE.split(f"## {title}\n")[1], maxsplit=1, flags=re.M)[0]


def table_names(text: str) -> set[str]:
    """The names in the first column of the tables of a text."""
    return {name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)}


def test_the_results_page_has_the_columns_of_the_history_and_no_others() -> None:
    assert table_names(section("History")) == {*RECORD_FIELDS, *STATISTICS, "test_NAME"}


def test_the_results_page_has_the_keys_of_summaries() -> None:
    program = load_program("digits", data=None, seed=0, batch_size=None)
    measured = paceline.train(program, "replicas=2", steps=2, noise_scale=True, progress=False)
    divided = paceline.train(program, "stages=2", steps=2, trace=True, progress=False)
    found = measured.summary.keys() | divided.summary.keys()
    # An interruption, a reason to stop, errors of a callback and of the disk.
    others = {"signal", "stopped", "callback_error", "not_saved"}
    assert table_names(section("Summary")) == found | others


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs"), f"{notebook.name} has outputs; run: jupyter nbconvert --clear-output --inplace"
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path) -> None:
    (tmp_path / "cells.py").write_text("\n\n".join(cells(notebook, "code")), "utf-8")
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs Sphinx, Furo and MyST-NB: make docs installs them")
@pytest.mark.timeout(1200)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", "docs", "-d"]
    done = subprocess.run(
        [*command, tmp_path / "doctrees", ".", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "docs" / "index.html").exists()
    assert 'class="sig sig-object py" id="paceline.train"' in (
        tmp_path / "site" / "docs" / "reference" / "api" / "training.html"
    ).read_text("utf-8")
