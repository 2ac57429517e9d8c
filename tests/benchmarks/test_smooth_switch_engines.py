"""Real workers beside virtual time: the fit, what spans say, and the verdicts, from figures that are made up."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.aggregation import SmoothSwitch, parse
from paceline.api.train import open_engine
from paceline.core.errors import InputError
from paceline.core.records import Record
from paceline.datasets.digits import digits
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.trace.spans import SERVER, Action, Span
from paceline.train_options import TrainOptions, job_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smooth_switch"

Load = Callable[[str], Any]


def spans(replica: int, *parts: tuple[Action, int]) -> list[Span]:
    """One after the other, in milliseconds."""
    ends = list(accumulate((length for _, length in parts), initial=0))
    return [
        Span(replica, 0, 0, action, 1, 0, start * 1_000_000, end * 1_000_000, 0)
        for (action, _), (start, end) in zip(parts, pairwise(ends), strict=True)
    ]


def result(load: Load, accuracy: float, gradients: int = 100) -> Any:
    return load("cells").Result(accuracy, 1 - accuracy / 100, 2 - accuracy / 100, 10, gradients, {})


def made_up_rounds(load: Load, tmp_path: Path, real: list[float], virtual: list[float]) -> tuple[list[Any], Any]:
    """Rounds whose Smooth Switch is so many points better, and a store that has the virtual ones."""
    engines, store = load("engines"), load("cells").Store(tmp_path, {})
    server = load("server_time").Server(0.003, 0.001)
    rounds = []
    for number, (gain, virtual_gain) in enumerate(zip(real, virtual, strict=True)):
        cells = {
            name: replace(c, times=f"compute={number + 1}") for name, c in engines._cells("sum", number, 2).items()
        }
        made = {name: result(load, 50 + gain * (name == "smooth-switch"), 200) for name in cells}
        for name, cell in cells.items():
            store._read[cell] = result(load, 60 + virtual_gain * (name == "smooth-switch"), 300)
        rounds.append(
            engines.Round("local", "sum", engines.Steps(0.001, 0.0002, 0.006, 50.0), server, 2e-5, made, cells)
        )
    return rounds, store


# -------------------------------------------------------------------------------------------------------------- the fit


@settings(deadline=None)
@given(apply_s=st.floats(0, 0.01), gradient_s=st.floats(1e-5, 0.01))
def test_a_line_is_found_again(load: Load, apply_s: float, gradient_s: float) -> None:
    module = load("server_time")
    line = module.Server(apply_s, gradient_s)
    found = module.fit({k: line.period_s(k) for k in module.SIZES})
    # Least squares of numbers around 1 in double precision; a is a difference of numbers up to 25 · c.
    assert found.apply_s == pytest.approx(apply_s, rel=1e-6, abs=1e-9)
    assert found.gradient_s == pytest.approx(gradient_s, rel=1e-6)


def test_a_line_never_takes_less_than_no_time(load: Load) -> None:
    module = load("server_time")
    found = module.fit({1: 0.0005, 5: 0.005, 25: 0.03})
    assert found.apply_s == 0
    assert found.gradient_s > 0


def test_distances_are_relative(load: Load) -> None:
    # The same 10 % at K = 1 and at K = 25 pull alike, so the line is off by less than 10 % at both.
    module = load("server_time")
    points = {1: 0.003 * 1.1, 5: 0.007, 12: 0.014, 25: 0.027 * 0.9}
    found = module.fit(points)
    assert found.residual(points) < 0.1
    assert module.Server(0.002, 0.001).residual(points) > 0.1


def test_periods_are_taken_after_the_warm_up(load: Load) -> None:
    def record(time_s: float, updates: int) -> Record:
        return Record(time_s, updates, 0, 1, None, None, None, None)

    history = [record(0.0, 0), record(1.9, 5), record(2.1, 10), record(4.0, 60), record(8.1, 160)]
    assert load("server_time").period_s(history) == pytest.approx(6.0 / 150)


def test_points_survive_their_sheet_and_medians_are_of_one_engine(load: Load, tmp_path: Path) -> None:
    module = load("server_time")
    points = [module.Point("ray", 5, i, period, 0.25) for i, period in enumerate((0.004, 0.009, 0.005))]
    points.append(module.Point("local", 5, 0, 0.001, 0.5))
    load("sheets").write(tmp_path / module.SHEET, [point.row() for point in points])
    assert module.points_of(tmp_path) == points
    assert module.medians(points, "ray") == {5: 0.005}
    assert module.shortest(points, "ray") == {5: 0.004}
    assert module.points_of(tmp_path / "nowhere") == []


def test_what_is_told_of_a_server_is_what_is_read(load: Load) -> None:
    module = load("server_time")
    told = module.told({1: 0.003, 5: 0.007, 25: 0.027})
    assert told["residual"] == pytest.approx(0, abs=1e-6)
    assert told["period_s/25"] == 0.027
    assert module.kept({"ray": told}, "ray") == module.Server(pytest.approx(0.002), pytest.approx(0.001))


def test_the_fit_is_what_the_sensitivity_table_takes(load: Load) -> None:
    told = load("server_time").told({1: 0.003, 5: 0.007, 25: 0.027})
    changes = {variation.change for variation in load("sensitivity").variations({"ray": told})}
    assert "apply_s=0.002 gradient_s=0.001" in changes


# ------------------------------------------------------------------------------------------------------------ the steps


def test_a_step_is_what_lies_between_spans_too(load: Load) -> None:
    # Worker 0 is delayed; worker 3 has no delay and makes two gradients
    step: list[tuple[Action, int]] = [("pull", 1), ("forward", 2), ("backward", 4), ("push", 3), ("wait", 20)]
    recorded = [*spans(0, ("delay", 500), *step), *spans(3, *step, *step), *spans(SERVER, ("apply", 9), ("apply", 5))]
    unrecorded = spans(3, ("wait", 66))[0]  # pushes worker 3's end from 60 ms to 66 ms
    engines = load("engines")
    steps = engines.steps_of([*recorded, replace(unrecorded, start_ns=65_000_000)], seconds=2.0)
    assert steps.compute_s == pytest.approx(0.006)
    assert steps.handling_s == pytest.approx(0.004)
    assert steps.left_s == pytest.approx(0.024 + 0.006 / 3)
    assert steps.rate == pytest.approx(1.5)
    assert engines.apply_s(recorded) == pytest.approx(0.007)


def test_the_time_at_the_server_is_no_transfer(load: Load) -> None:
    module, server = load("engines"), load("server_time").Server(0.003, 0.001)
    # Half busy: 4 ms for the update and 2 ms in the queue; of the 20 ms that are left, 7 are for either way.
    steps = module.Steps(compute_s=0.008, handling_s=0.002, left_s=0.020, rate=125.0)
    assert module.at_server_s(server, steps.rate) == pytest.approx(0.006)
    assert steps.transfer_s(server) == pytest.approx(0.007)


@pytest.mark.parametrize("rate", [245.0, 250.0, 300.0])
def test_a_server_that_is_always_busy_leaves_push_and_pull(rate: float, load: Load) -> None:
    server = load("server_time").Server(0.003, 0.001)
    assert load("engines").Steps(0.008, 0.002, 0.020, rate).transfer_s(server) == 0.001


def test_no_server_handles_more_than_its_time_allows(load: Load) -> None:
    server = load("server_time").Server(0.003, 0.001)
    slow, quick = (load("engines").Steps(0.008, 0.002, 0.020, rate) for rate in (200.0, 500.0))
    assert slow.bound(server) == server
    # 500 gradients a second leave 2 ms for each, half of what the line says.
    assert quick.bound(server) == load("server_time").Server(pytest.approx(0.0015), pytest.approx(0.0005))


def test_steps_are_virtual_times(load: Load) -> None:
    steps = load("engines").Steps(0.008, 0.002, 0.020, 1000.0)
    times = steps.times(load("server_time").Server(0.003, 0.001))
    assert times == "compute=0.008 transfer=0.001 apply=0.003 gradient=0.001"


class Carrier(Engine):
    """Gives back what it was given, and keeps the job."""

    name = "carrier"

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    def refuse(self, job: Job) -> None:
        raise InputError("refused")

    def run(self, job: Job, watch: Watcher) -> Outcome:
        self.job = job
        outcome: Outcome = self._outcome
        return outcome


def carried() -> Any:
    return SimpleNamespace(spans=spans(0, ("forward", 1)))


def a_job() -> Job:
    return job_of(digits(data=None, seed=0), "replicas=2", open_engine("virtual"), TrainOptions(steps=1))


def test_another_engine_is_traced_as_it_is(load: Load) -> None:
    carrier = Carrier(carried())
    traced, job = load("engines").Traced(carrier), a_job()
    traced.run(job, Watcher())
    assert (traced.name, traced.spans) == ("carrier", spans(0, ("forward", 1)))
    assert carrier.job == replace(job, trace=True) != job
    with pytest.raises(InputError, match="refused"):
        traced.refuse(job)


def test_both_algorithms_have_one_seed_and_the_papers_delay(load: Load) -> None:
    cells = load("engines")._cells("mean", 2, 20.0)
    assert {cell.round for cell in cells.values()} == {2}
    assert {cell.delay for cell in cells.values()} == {"fraction=0.5 normal:mean=0,std=0.25"}
    assert cells["asynchronous"].policy == "asynchronous"
    assert parse(cells["smooth-switch"].policy) == SmoothSwitch(every=500, combine="mean")


# --------------------------------------------------------------------------------------------------------- the verdicts


@pytest.mark.parametrize(
    ("real", "virtual", "verdict"),
    [
        ((2.0, 0.5), (3.0, 1.0), "agree"),
        ((-2.0, 0.5), (-0.3, 0.1), "agree"),
        ((2.0, 0.5), (-3.0, 1.0), "disagree"),
        ((2.0, 2.5), (3.0, 1.0), "unclear"),
        ((2.0, 0.5), (0.3, 1.0), "unclear"),
        ((2.0, math.nan), (3.0, 1.0), "unclear"),
        ((0.0, 0.0), (3.0, 1.0), "unclear"),
    ],
)
def test_an_interval_that_contains_0_is_no_agreement(
    real: tuple[float, float], virtual: tuple[float, float], verdict: str, load: Load
) -> None:
    assert load("engines").Agreement("test_loss", real, virtual).verdict == verdict


def test_rows_hold_differences_and_counts(load: Load, tmp_path: Path) -> None:
    rounds, store = made_up_rounds(load, tmp_path, real=[1.9, 2.0, 2.1], virtual=[-2.9, -3.0, -3.1])
    rows = list(load("engines").rows(rounds, store))
    assert [row["metric"] for row in rows] == ["test_accuracy", "test_loss", "train_loss"]
    assert [float(row["real"]) for row in rows] == pytest.approx([2.0, -0.02, -0.02])
    assert [float(row["virtual"]) for row in rows] == pytest.approx([-3.0, 0.03, 0.03])
    assert {row["verdict"] for row in rows} == {"disagree"}
    assert rows[0]["smooth_switch_gradients_real"] == 200
    assert rows[0]["asynchronous_gradients_virtual"] == 300
    # t(0.975, 2) · 0.1 / √3
    assert float(rows[0]["real_half_width"]) == pytest.approx(0.2484, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_says_what_is_missing(load: Load, tmp_path: Path) -> None:
    module = load("engine_sections")
    assert "`python benchmarks/smooth_switch/measure.py --fit-server`" in module.servers(tmp_path)
    assert "`python benchmarks/smooth_switch/measure.py --engines`" in module.agreement(tmp_path)


def test_the_page_shows_the_line_and_who_else_had_the_cores(load: Load, tmp_path: Path) -> None:
    module = load("server_time")
    line = module.Server(0.002, 0.001)
    points = [module.Point("ray", k, 0, line.period_s(k), 0.1 + k / 100) for k in module.SIZES]
    load("sheets").write(tmp_path / module.SHEET, [point.row() for point in points])
    text = load("engine_sections").servers(tmp_path)
    assert "| ray, medians | 2.000 | 1.000 | 0 % | 3.00 | 4.00 |" in text
    assert "| shortest | 2.000 | 1.000 | 0 % | 3.00 | 4.00 |" in text
    assert "had 11 to 35 % of the cores" in text


def test_the_page_counts_verdicts(load: Load, tmp_path: Path) -> None:
    rounds, store = made_up_rounds(load, tmp_path / "cache", real=[1.9, 2.0, 2.1], virtual=[2.9, 3.0, 3.1])
    engines = load("engines")
    rows = list(engines.rows(rounds, store))
    load("sheets").write(tmp_path / engines.SHEET, rows)
    text = load("engine_sections").agreement(tmp_path)
    assert "**3 agree in sign, 0 disagree, 0 are unclear**" in text
    assert "| local | `sum` | test accuracy, points | +2.000 ± 0.248 | +3.000 ± 0.248 | agree |" in text
    assert "| local | `sum` | 200 | 300 | 200 | 300 | 1 | 0.75 | 3 + 1 K |" in text


def test_engines_are_not_compared_before_their_servers_are_timed(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load("measured"), "read", dict)
    words = ["--engines", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    assert load("measure").main(words) == 2
    assert "the server's time of local, ray has not been measured; write --fit-server too" in capsys.readouterr().err
