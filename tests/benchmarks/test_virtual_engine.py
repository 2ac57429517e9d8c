"""The benchmark of the virtual engine's scale: its section of the page, and its runs in small."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "virtual_engine"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_the_section_has_medians_and_leaves_the_rest_of_the_page(load: Load, tmp_path: Path) -> None:
    scale = load("scale")
    sheet = scale.Sheet(tmp_path / "results" / "scale.csv", ("kind", "policy", "round"))
    facts = {"kind": "1,002 parameters", "policy": "synchronous", "updates": 100, "load": 1.25}
    for number, seconds in enumerate([70.0, 90.0, 80.0]):
        figures = {"round": number, "seconds": seconds, "cpu_s": seconds / 2, "peak_mib": 700.4}
        sheet.put(facts | figures | MACHINE)
    path = tmp_path / "README.md"
    path.write_text("# The first part\n\n## Scale\n\nold\n", encoding="utf-8")
    for _ in range(2):
        scale.page(sheet.rows, path)
        text = path.read_text("utf-8")
        assert text.startswith("# The first part\n\n## Scale\n\n10,000 replicas")
        assert text.count("## Scale") == 1
        assert "old" not in text
        assert "| `synchronous` | 1,002 parameters | 100 | 80 | 40 | 700 | 1.2 | 3 |" in text


def test_all_kinds_make_the_updates_of_their_deltas(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = load("scale")
    monkeypatch.setattr(scale, "REPLICAS", 20)
    monkeypatch.setattr(scale, "STEPS", 3)
    for kind, policies in scale.KINDS.items():
        for policy in policies:
            found = scale.once(kind, policy)
            if policy == "synchronous":
                assert found["updates"] == 3
            elif not policy.startswith("smooth-switch"):
                assert found["updates"] == 60
            assert found["peak_mib"] > 0
