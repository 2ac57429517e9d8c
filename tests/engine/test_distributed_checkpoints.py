"""Runs of several ranks that were cut in two, went on in another split, or diverged."""

from pathlib import Path

import pytest

from tests.ranks import Play

SCRIPT = Path(__file__).with_name("distributed_checkpoint_script.py")


@pytest.mark.parametrize(("what", "ranks"), [("async", 2), ("late", 2), ("cut", 2), ("split", 4)])
def test_ranks(tmp_path: Path, play: Play, what: str, ranks: int) -> None:
    play(SCRIPT, what, size=ranks, folder=tmp_path)
