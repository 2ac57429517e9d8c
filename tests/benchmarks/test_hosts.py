"""The benchmark of servers on several hosts: what it counts, and its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "hosts"

Load = Callable[[str], Any]

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}


def test_rates_are_those_while_all_workers_step(load: Load) -> None:
    measure = load("measure")
    ends = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0], [1.5, 1.75, 2.0, 4.0, 6.0]]
    samples = [(float(t), 100 * t) for t in range(10)]
    found = measure.figures(ends, samples)
    # From 2.0, when both had made their first two steps, to 6.0, when the second one ended: 3 and 2 steps.
    assert found["updates_per_s"] == pytest.approx(5 / 4)
    assert found["sent_bytes_per_s"] == pytest.approx(100)
    assert found["sent_bytes_per_update"] == pytest.approx(80)


def test_the_page_has_medians_beside_raw_sockets(load: Load, tmp_path: Path) -> None:
    measure = load("measure")
    sheet = measure.Sheet(tmp_path / "rates.csv", measure.KEYS)

    def put(side: str, number: int, sent: float, **values: Any) -> None:
        common = {"mbit": 1000, "hosts": 4, "apart": False, "workers": 4, "servers": 4, "parameters": 25}
        figures = {"updates_per_s": sent / 2, "sent_bytes_per_s": sent * 1e6, "sent_bytes_per_update": 2e6}
        row = common | {"round": number, "compression": "none", "more": ""} | values | {"side": side} | figures
        sheet.put(row | MACHINE)

    for number, sent in enumerate((10, 30, 20)):
        put("paceline", number, sent)
        put("paceline", number, 2 * sent, compression="fp16")
        put("sockets", number, 40, servers=0, parameters=0)
    measure.page(sheet, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| paceline | 25 | 4 | 4 | 10 | 2 | 20 | 0.50 | 3 |" in text
    assert "| paceline, fp16 | 25 | 4 | 4 | 20 | 2 | 40 | 1.00 | 3 |" in text
    assert "Workers apart" not in text


def test_every_row_has_a_place_on_the_page(load: Load) -> None:
    measure = load("measure")
    places = {(str(c.mbit), str(c.hosts), str(c.apart)) for c in measure.cases(1) if c.side != "sockets"}
    assert places == set(measure.TITLES.values())
