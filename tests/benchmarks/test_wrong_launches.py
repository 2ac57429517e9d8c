"""Jobs whose ranks don't fit together end, and all their ranks name both processes and the field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]

KINDS = (
    "twice", "missing", "size", "port", "torch", "paceline", "strategy", "shape", "order", "dtype", "model", "loss",
    "seed", "data", "rate", "optimizer", "batch", "clip",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_name_what_is_wrong(load: Load, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load("rows")
    launches = load("rows.launches")
    monkeypatch.setattr(launches, "BOUND_S", launches.HANG_S)  # a test does not time anything
    assert launches.judge(kind, launches.start("paceline", kind)) is None


def test_these_are_all(load: Load) -> None:
    load("rows")
    assert tuple(load("rows.launches").WRONG) == KINDS
