"""Jobs whose ranks don't fit together end, and all their ranks name both processes and the field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]

# Those that only processes of their own can be; tests/engine/test_distributed_failures.py has the others.
KINDS = ("twice", "missing", "size", "port", "torch", "paceline", "shape", "order", "dtype", "seed")


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_name_what_is_wrong(load: Load, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load("rows")
    launches = load("rows.launches")
    monkeypatch.setattr(launches, "BOUND_S", launches.HANG_S)  # a test does not time anything
    assert launches.judge(kind, launches.start("paceline", kind)) is None


def test_the_row_has_these_and_more(load: Load) -> None:
    load("rows")
    assert set(KINDS) < set(load("rows.launches").WRONG)
