"""The pages name places that are there, and README's docs lead from one page to the next."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = sorted(
    {(page.name, path) for page in PAGES for path in re.findall(r"`((?:[\w.]+/)+\w+\.py)`", page.read_text("utf-8"))}
)
PLACES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+(?:\.py|/))(?::[ \w]*)?`", PAGE)))
CLASSES = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py): (\w+)`", PAGE)))


@pytest.mark.parametrize("place", PLACES)
def test_places_are_there(place: str) -> None:
    assert (PACKAGE / place).exists() or (ROOT / place).exists(), f"docs/architecture.md names {place}"


@pytest.mark.parametrize(("page", "path"), FILES)
def test_files_are_there(page: str, path: str) -> None:
    to_write = "NAME" in path or path.endswith("/drop_stale.py")  # docs/adding-a-policy.md has the reader write it
    assert to_write or any((base / path).exists() for base in (PACKAGE, ROOT, ROOT / "tests")), f"{page} names {path}"


@pytest.mark.parametrize(("place", "name"), CLASSES)
def test_contracts_are_there(place: str, name: str) -> None:
    assert re.search(rf"^class {name}\b", (PACKAGE / place).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_folder_is_mentioned() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")}
    assert not {folder for folder in folders if f"{folder}/" not in PAGE and f"`{folder}`" not in PAGE}


def test_each_page_leads_to_the_next_and_all_are_reached() -> None:
    pages, page = {"architecture.md"}, "architecture.md"
    link = re.compile(r"^Read on: \[.*\]\((\S+\.md)\)\.$", re.MULTILINE)
    while found := link.search((ROOT / "docs" / page).read_text("utf-8")):
        page = found[1]
        assert page not in pages
        pages.add(page)
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}  # its sections lead on
