"""Rates of products by architecture: found in rows that were made with one, and those of the published rows."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from paceline.planner.calibration.corrections import Case
from paceline.planner.calibration.device_rates import EXPECTED, RATES, Errors, data_sheet_s, taught
from paceline.planner.calibration.rows import PublishedRow, read
from paceline.planner.devices import TAUGHT, Taught
from tests.planner.published_rows import grid

SLOW = RATES[EXPECTED - 10]


def made(rate: float, source: str, framework: str) -> list[PublishedRow]:
    """A few rows of H100s whose products are at a rate."""
    columns = {"framework": framework, "hw": "H100", "peak_tflops": 989.5, "precision": "bf16"}
    found = []
    for each in grid(source, **columns)[::5][:12]:
        case = Case.of(each)
        assert case is not None
        found.append(PublishedRow({**each.cells, "step_time_s": repr(data_sheet_s(case.at_rate(rate)))}))
    return found


def test_the_rate_of_frameworks_that_run_modules_as_they_are_is_found() -> None:
    rows = made(SLOW, "a", "torchtitan") + made(1.0, "b", "NeMo/Megatron-Core")
    found, errors = taught(rows)["Hopper"]
    assert (found.rate, found.rows, found.sources) == (round(SLOW, 2), 12, 1)
    assert found.spread == pytest.approx(0.0, abs=0.01)
    assert [row.source for row in errors.rows] == ["a"] * 12
    assert taught(rows[12:])["Hopper"][0].rate == 1.0


def test_each_source_counts_alike() -> None:
    """Twelve rows of one source don't outvote six of two others."""
    rows = made(SLOW, "a", "torchtitan") + made(1.0, "b", "Composer")[-3:] + made(1.0, "c", "HF")[-3:]
    assert taught(rows)["Hopper"][0].rate == 1.0


def test_left_out_is_at_the_rate_of_the_others() -> None:
    rows = [PublishedRow({"row_id": str(n), "source_id": source}) for n, source in enumerate("aab")]
    logarithms = np.abs(np.log(np.array(RATES))[None, :] - np.log([[SLOW], [SLOW], [1.0]]))
    errors = Errors(rows, logarithms)
    by_source = errors.left_out(lambda row: row.source)
    gap = abs(np.log(SLOW))
    # Those of b are predicted by a's rate, and the reverse.
    assert by_source == pytest.approx([gap, gap, gap])
    assert errors.left_out(lambda row: "one") == pytest.approx(logarithms[:, EXPECTED])


@pytest.fixture(scope="module")
def published(planner_data: Path) -> Mapping[str, tuple[Taught, Errors]]:
    return taught(read(planner_data / "calibration.csv"))


def test_rates_of_named_devices_are_those_of_published_rows(published: Mapping[str, tuple[Taught, Errors]]) -> None:
    assert {name: found for name, (found, _) in published.items()} == TAUGHT


def test_hopper_is_predicted_within_the_aim_by_rates_of_others(
    published: Mapping[str, tuple[Taught, Errors]],
) -> None:
    """At what is expected of data sheets it is 23 % too fast."""
    _, errors = published["Hopper"]
    for key in (lambda row: row.source, lambda row: row.group):
        off = errors.left_out(key)
        assert np.median(np.abs(np.exp(off) - 1)) <= 0.15
        assert abs(np.median(off)) <= 0.05
