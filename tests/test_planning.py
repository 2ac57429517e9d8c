"""paceline.plan: a program on this host, a program on another machine, a shape."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.api import plan, plan_verification
from paceline.api.plan_verification import Verified
from paceline.clock.cluster_file import Links
from paceline.core.errors import InputError
from paceline.planner.base import Plan
from paceline.planner.cluster import Cluster, Described, Device
from paceline.planner.program import plans, profiling
from paceline.planner.program.profile import Profile, load, save
from tests.planner.profiles import PROFILE
from tests.planner.test_probe import program

SHAPE = """
[model]
layers = 4
hidden = 64
heads = 4
vocab = 1000
sequence = 32

[train]
global_batch = 16
"""

ELSEWHERE = Cluster(2, 4, Device("chip", 4e9, 1e12, 1e12), Described(Links(1e9, 1e8)), "two hosts")


def known() -> Profile:
    """Of the program of tests, by hand."""
    return replace(PROFILE, program="program", parameters=212)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This host has two cores, and its profile is known; how often it was measured, by workers."""
    measured: list[int] = []

    def profile(program: object, workers: int, tell: object, **words: Any) -> Profile:
        measured.append(workers)
        return known()

    def predicted(plans: Any, *rest: object) -> list[Plan]:
        return list(plans)

    monkeypatch.setattr(profiling, "profile", profile)
    monkeypatch.setattr(plans, "profile", profile)
    monkeypatch.setattr(plans, "predict_from_components", predicted)
    monkeypatch.setattr("paceline.planner.program.closed_form.cores", lambda: 2)
    return measured


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_planner_needs_no_torch() -> None:
    modules = "paceline.planner.search.search, paceline.plan.predict"
    code = f"import sys, {modules}; from paceline import plan"
    assert run_python(f"{code}; print(type(plan).__name__, 'torch' in sys.modules)") == "function False"


def test_predictions_of_rows_run_as_a_program() -> None:
    command = [sys.executable, "-m", "paceline.plan.predict", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_plans_of_a_program_are_a_sequence(here: list[int]) -> None:
    plans = paceline.plan(program(), progress=False)
    assert here == [2]
    assert list(plans) == [plans[i] for i in range(len(plans))] == list(plans[:])
    assert plans.best == plans[0]
    assert plans.best.strategy is not None
    rates = [plan.samples_per_s for plan in plans[1:]]
    assert rates == sorted(rates, reverse=True)
    assert str(plans.best.strategy) in plans.text()
    assert plans.profile == known()


def test_a_profile_is_kept_and_taken_again(here: list[int], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = paceline.plan(program(), profile=path, progress=False)
    assert load(path) == first.profile
    again = paceline.plan(program(), profile=path, progress=False)
    assert here == [2]  # it was measured once
    assert [str(plan.strategy) for plan in again] == [str(plan.strategy) for plan in first]


def test_a_profile_of_something_else_is_refused(here: list[int], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(replace(known(), program="other"), path)
    with pytest.raises(InputError, match="is the profile of other with 212 parameters, not of program with 212"):
        paceline.plan(program(), profile=path, progress=False)
    save(replace(known(), busy=known().busy[:1]), path)
    with pytest.raises(InputError, match="was measured with 1 workers, not 2"):
        paceline.plan(program(), profile=path, progress=False)


def test_the_best_are_verified(here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(train: Any, plans: Any, program: object, **words: Any) -> list[Verified]:
        return [Verified(plan, (2 * plan.cost.step_s,)) for plan in plans]

    monkeypatch.setattr(plan_verification, "run_in_turns", in_turns)
    plans = paceline.plan(program(), verify=2, progress=False)
    assert [each.plan for each in plans.verified[:2]] == list(plans[:2])
    assert [each.ratio for each in plans.verified[:2]] == pytest.approx([2.0, 2.0])
    assert plans.text().count("2.00 times") == 2
    kinds = ["true"] if plans.best.strategy.spread else ["true", "graph"]
    assert [str(each.plan.strategy) for each in plans.verified[2:]] == [
        f"{plans.best.strategy} compile={kind}" for kind in kinds
    ]
    assert plans.text().endswith("1.00 times the plain one's: to compile does not pay")


def test_a_program_is_planned_for_another_machine(here: list[int]) -> None:
    plans = paceline.plan(program(), cluster=ELSEWHERE, progress=False)
    assert max(plan.arrangement.workers for plan in plans) > 2
    assert "scaled by 0.25" in plans.best.provenance["compute"]
    assert plans.best.high_s >= 2 * plans.best.cost.step_s


def test_a_shape_is_planned_for_a_described_cluster(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SHAPE, encoding="utf-8")
    plans = paceline.plan(path, cluster=ELSEWHERE)
    assert plans.name == "small"
    assert plans.best.strategy is not None
    assert len(paceline.plan(str(path), cluster=ELSEWHERE, workers=1)) > 0


def test_a_shape_is_planned_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SHAPE, encoding="utf-8")
    code = f"import sys, paceline\nplans = paceline.plan({str(path)!r}, cluster='1x4 A100-80GB')\n"
    assert run_python(code + "print(len(plans) > 0, 'torch' in sys.modules)") == "True False"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"program": "small.toml"}, "is a shape, without code"),
        ({"program": "small.toml", "cluster": ELSEWHERE, "verify": 1}, "verify=1: a shape has no code to run"),
        ({"cluster": ELSEWHERE, "verify": 2}, "verify=2: plans for another machine"),
        ({"program": 3}, "program is int, no Program and no name"),
        ({"program": "digit"}, "did you mean 'digits'"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 5}, "workers=5, but this process may use 2 cores"),
        ({"objective": "luck"}, "unknown objective 'luck'"),
        ({"objective": "goodput"}, "write noise_scale=1000"),
    ],
)
def test_what_can_not_be_planned_is_refused(words: dict[str, Any], message: str, here: list[int]) -> None:
    given = {"program": program(), "progress": False} | words
    with pytest.raises(InputError, match=message):
        paceline.plan(**given)


def test_where_nothing_fits_there_is_no_best() -> None:
    plans = plan.Plans("big", (), None, ELSEWHERE, None)  # type: ignore[arg-type]
    assert plans.text() == "nothing fits"
    with pytest.raises(InputError, match="nothing fits: no way to train big on two hosts"):
        plans.best  # noqa: B018
