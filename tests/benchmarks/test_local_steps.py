"""The benchmark of local steps: its page, and one side over a link."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "local_steps"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_page_has_medians_and_ratios(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    loss = measure.Sheet(tmp_path / "loss.csv", ("side", "seed"))
    for seed, (plain, own) in enumerate([(1.5, 1.75), (1.25, 1.5), (2.0, 2.0)]):
        loss.put({"side": "synchronous", "seed": seed, "test_loss": plain} | MACHINE)
        loss.put({"side": "DiLoCo", "seed": seed, "test_loss": own} | MACHINE)
    link = measure.Sheet(tmp_path / "links.csv", ("side", "mbit", "round"))
    measure.page(loss, link, tmp_path)
    assert "Slow links" not in (tmp_path / "README.md").read_text("utf-8")
    policies = measure.POLICIES
    for side, seconds in (("synchronous", 0.5), ("DiLoCo", 0.05)):
        words = f"{measure.OWN} aggregation={policies[side]}"
        link.put({"side": words, "mbit": 100, "round": 0, "step_s": seconds, "payload_bytes": 2**21} | MACHINE)
    measure.page(loss, link, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert f"| DiLoCo | `{policies['DiLoCo']}` | 1.7500 | +0.2500 | +0.0000 to +0.2500 | 3 |" in text
    assert "| DiLoCo | 50.0 | 10.0 | 2.00 | 1 |" in text


def test_local_steps_send_less_over_a_link(load: Load) -> None:
    measure = load("measure")
    reason = load("kit.hosts").why_not()
    if reason is not None:
        pytest.skip(reason)
    plain, own = (
        measure.over(f"replicas=2 aggregation={policy}", 1000.0, steps=20)
        for policy in ("synchronous", "local-steps:period=10")
    )
    assert own["payload_bytes"] == pytest.approx(plain["payload_bytes"] / 10, rel=0.01)
