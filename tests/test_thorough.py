"""Every entry of the table of thorough tests names tests that are there; shards share them out."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import TABLE, Thorough, shard_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_entries_name_tests_that_are_there(entry: Thorough) -> None:
    path, _, function = entry.name.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not function or f"\ndef {function}(" in text


def test_no_test_has_two_entries() -> None:
    assert len({entry.name for entry in TABLE}) == len(TABLE)


def test_shards_keep_together_what_shares_fixtures() -> None:
    names = [f"tests/test_{file}.py::test_{function}" for file in range(40) for function in range(5)]
    shards = [shard_of(name, 4) for name in names]
    assert {*shards} == {1, 2, 3, 4}
    assert len({shard_of(f"tests/test_it.py::test_{function}[two-3]", 4) for function in range(40)}) == 1
    assert {shard_of(name, 1) for name in names} == {1}


@pytest.mark.parametrize("shard", ["5/4", "0/4", "two"])
def test_a_shard_that_there_is_not_is_refused(shard: str) -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", f"--shard={shard}", __file__]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--shard={shard}: write K/N" in done.stderr
