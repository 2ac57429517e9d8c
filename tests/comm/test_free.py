"""What may still be filled under the limits of memory groups."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.comm.linux import FIRST, SECOND, available_bytes, left, limited


@pytest.mark.parametrize("names", [FIRST, SECOND])
def test_what_is_used_counts_but_not_what_can_be_taken_back(names: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / names["limit"]).write_text("1000\n")
    (tmp_path / names["used"]).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 500\n{names['evictable']} 150\n")
    assert left(tmp_path, names) == 1000 - 700 + 150


def test_a_limit_alone_is_all_that_is_left(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    assert left(tmp_path, SECOND) == 1000


def test_without_a_limit_any_amount_is_left(tmp_path: Path) -> None:
    assert left(tmp_path, SECOND) == float("inf")
    (tmp_path / "memory.max").write_text("max\n")
    assert left(tmp_path, SECOND) == float("inf")


def test_groups_of_both_versions_are_found() -> None:
    said = "5:cpu:/\n4:cpuset,memory:/jobs/7\n0::/user/8\n"
    root = Path("/groups")
    assert list(limited(said, root)) == [
        (root / "memory", FIRST),
        (root / "memory/jobs/7", FIRST),
        (root, SECOND),
        (root / "user/8", SECOND),
    ]


def test_something_is_free_here() -> None:
    assert available_bytes() > 0
