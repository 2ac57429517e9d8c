"""Every entry of the table of thorough tests names tests that are there."""

from pathlib import Path

import pytest

from tests.thorough import TABLE, Thorough

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_entries_name_tests_that_are_there(entry: Thorough) -> None:
    path, _, function = entry.name.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not function or f"\ndef {function}(" in text


def test_no_test_has_two_entries() -> None:
    assert len({entry.name for entry in TABLE}) == len(TABLE)
