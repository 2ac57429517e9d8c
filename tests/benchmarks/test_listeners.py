"""Nothing of a run listens but on loopback, and strangers at its ports change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"

Load = Callable[[str], Any]


@pytest.mark.parametrize("engine", ["ranks by hand, Gloo", "ranks by hand, shm", "torchrun", "local"])
def test_nothing_listens_to_other_hosts(load: Load, engine: str) -> None:
    load("rows")
    rows, injector = load("rows.listeners"), load("injector")
    with injector.trainee(steps=100_000, **rows.ENGINES[engine]) as run:
        assert run.wait_for_step() is not None, run.stderr()
        found = rows.listeners(str(run.folder))
    assert [each for each in found if not each.loopback and not each.torchruns] == []
    assert bool(found) == (engine != "local"), "a check that finds no port has not looked"


def test_strangers_change_nothing(load: Load) -> None:
    load("rows")
    rows, injector = load("rows.listeners"), load("injector")
    settings = {"steps": 60, "pause_s": 0.02, **rows.ENGINES["ranks by hand, Gloo"]}
    whole = injector.undisturbed(**settings)
    with injector.trainee(**settings) as run:
        assert run.wait_for_step() is not None, run.stderr()
        done = rows.disturb(sorted({each.port for each in rows.listeners(str(run.folder))}), run, 0.02)
        result = run.result()
    assert done["half_open"] > 0
    assert result is not None, run.stderr()
    assert result["digest"] == whole["digest"]
