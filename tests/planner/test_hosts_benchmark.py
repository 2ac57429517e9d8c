"""The benchmark of servers on emulated hosts: what it measures apart, and its page."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MACHINE = {"processor": "A", "cores": "2", "system": "Linux 6", "torch": "2", "python": "3", "date": "2026-01-01"}
MESSAGE_S, BYTE_S, ALONE_S = 1e-3, 2e-9, 5e-4


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "planner"))
    return importlib.import_module("hosts_predicted")


def row(
    side: str, mbit: int, hosts: int, replicas: int, servers: int, parameters: int, **rates: float
) -> dict[str, str]:
    """A row of the sheet."""
    numbers = {"mbit": mbit, "hosts": hosts, "workers": replicas, "servers": servers, "parameters": parameters}
    known = {"updates_per_s": 0.0, "sent_bytes_per_s": 0.0, "load": 1.0} | rates
    return {"side": side, **{name: str(value) for name, value in (numbers | known).items()}, **MACHINE}


def calibration() -> list[dict[str, str]]:
    """Rows of links of 25 MB/s, and of a machine of the constants above."""
    rows = [row("sockets", 200, 4, 4, 0, 0, sent_bytes_per_s=100e6)]
    for parameters in (10_000, 1_000_000):
        rows.append(row("paceline", 0, 1, 2, 1, parameters, updates_per_s=1 / ALONE_S))
        delta_s = ALONE_S + 3 * MESSAGE_S + 3 / 4 * 4 * parameters * BYTE_S
        rows.append(row("paceline", 0, 4, 4, 4, parameters, updates_per_s=1 / delta_s))
    return rows


def test_the_machine_is_found_again(predicted: ModuleType) -> None:
    machine = predicted.measured_machine(calibration())
    assert machine.link_bytes_per_s == {"200": 25e6}
    assert machine.alone_s["10000"] == pytest.approx(ALONE_S)
    assert (machine.message_s, machine.byte_s) == pytest.approx((MESSAGE_S, BYTE_S))


def test_the_page_has_predictions_beside_what_is_measured(predicted: ModuleType) -> None:
    page = importlib.import_module("hosts_page")
    rows = calibration()
    made = row("paceline", 200, 4, 4, 2, 1_000_000)
    found = predicted.predicted(made, predicted.measured_machine(rows))
    rows.append(made | {name: str(value) for name, value in found._asdict().items()})
    text = page.page(rows)
    assert "25 MB/s of 200 Mbit/s" in text
    assert "- all, 1 runs: Δs a second 0%, 0%; bytes on links 0%, 0%" in text
    assert text.count("| 1.00 |") == 2
    assert sys.modules["hosts_predicted"] is predicted
