"""Profiles: lines through points, kinds of workers, files that are whole and of this machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.planner.base import Arrangement
from paceline.planner.program.profile import LineFit, kind, load, save, this_machine
from tests.planner.profiles import PROFILE, uncut


@given(st.floats(0, 10), st.floats(0, 10), st.sets(st.integers(1, 1000), min_size=2, max_size=5))
def test_a_line_is_found_again(fixed: float, each: float, sizes: set[int]) -> None:
    found = LineFit.through({size: fixed + each * size for size in sizes})
    for size in sizes:  # sums of a few doubles: their rounding, far below what is measured
        assert found.of(size) == pytest.approx(fixed + each * size, rel=1e-9, abs=1e-9)


@given(st.dictionaries(st.integers(1, 1000), st.floats(0, 100), min_size=1, max_size=5))
def test_no_line_is_below_zero_anywhere(points: dict[int, float]) -> None:
    found = LineFit.through(points)
    assert found.fixed >= 0 <= found.each


@pytest.mark.parametrize(
    ("arrangement", "expected"),
    [
        (Arrangement(), "alone"),
        (Arrangement(replicas=2), "replicas"),
        (Arrangement(stages=2), "stages"),
        (Arrangement(stages=2, copies=(2, 1)), "stages"),
        (Arrangement(recompute="full"), "stages"),
        (Arrangement(stages=2, shards=2), "shards"),
    ],
)
def test_kinds_of_workers(arrangement: Arrangement, expected: str) -> None:
    assert kind(arrangement) == expected
    assert PROFILE.context_bytes(arrangement) == PROFILE.runs[expected].beside_bytes


def test_without_a_short_run_a_worker_holds_what_a_process_does() -> None:
    assert replace(PROFILE, runs={}).context_bytes(Arrangement()) == PROFILE.base_bytes


def test_what_was_measured_with_as_many_at_work_is_taken() -> None:
    assert [PROFILE.at_work(n).workers for n in (1, 2, 3)] == [1, 2, 2]


@pytest.mark.parametrize("profile", [PROFILE, uncut(), replace(PROFILE, flops=None)])
def test_a_file_gives_the_same_profile(profile: Any, tmp_path: Path) -> None:
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_another_machine_is_refused(tmp_path: Path) -> None:
    other = replace(PROFILE, machine=replace(this_machine(), cores=99))
    save(other, tmp_path / "p.json")
    with pytest.raises(InputError, match=r"another machine, cores=99 \(here \d+\); measure anew"):
        load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.pop("units"),
        lambda value: value.update(format=0),
        lambda value: value.update(flops="many"),
        lambda value: value["points"][0].update(collective="gossip"),
        lambda value: value["busy"][0].update(workers=1.5),
        lambda value: value.update(units=3),
    ],
)
def test_a_damaged_file_is_named(spoil: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(PROFILE, path)
    value = json.loads(path.read_text(encoding="utf-8"))
    spoil(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(InputError, match=r"p\.json is no profile: "):
        load(path)


def test_what_is_no_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no profile"):
        load(tmp_path / "none.json")
    with pytest.raises(InputError, match="can't be written"):
        save(PROFILE, tmp_path / "none" / "p.json")
