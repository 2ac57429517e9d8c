"""The benchmark of rounds under stragglers: its page, its picture, and one row in small."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "decoupled"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_page_has_medians_of_ratios_seed_by_seed(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    sheet = measure.Sheet(tmp_path / "results" / "goodput.csv", ("side", "stragglers", "seed"))
    for seed, (calm, slowed) in enumerate([(100.0, 50.0), (200.0, 150.0), (50.0, 30.0)]):
        facts = {"side": "decoupled", "seed": seed, "updates": 9, "test_loss": 1.5 + seed} | MACHINE
        sheet.put(facts | {"stragglers": "none", "samples_per_s": calm})
        sheet.put(facts | {"stragglers": "two slow", "samples_per_s": slowed})
    measure.page(sheet, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| decoupled | `decoupled:period=20` | 100.0 | 1.000 | 2.5000 |" in text
    assert "| decoupled | `decoupled:period=20` | 50.0 | 0.600 | 2.5000 |" in text
    assert ElementTree.parse(tmp_path / "results" / "goodput.svg").getroot().tag.endswith("svg")


def test_a_straggler_costs_rounds_of_those_in_time_less(load: Load) -> None:
    measure = load("measure")
    rates = {}
    for policy in ("local-steps:period=5", "decoupled:period=5"):
        calm, slowed = (
            float(measure.row("", policy, "", delay, 0, 60.0)["samples_per_s"])
            for delay in (None, "fraction=0.25 constant:value=3")
        )
        rates[policy] = slowed / calm
    assert rates["local-steps:period=5"] == pytest.approx(0.25, abs=0.1)
    assert rates["decoupled:period=5"] > 2 * rates["local-steps:period=5"]
