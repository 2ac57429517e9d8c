"""Tables with several servers of A: the order of the runs, the arithmetic, and the page, from made-up figures."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smooth_switch"

Load = Callable[[str], Any]

USAGE = {
    "server_cores": 0.5,
    "replica_cores": 1.25,
    "rest_cores": 0.05,
    "other_cores": 0.125,
    "server_running": 0.4,
    "server_ready": 0.3,
    "load": 9.0,
    "cores": 2,
}


def studies(load: Load, store: Any = None, rounds: int = 2) -> list[Any]:
    options = {"rounds": rounds, "engine": "ray", "seconds": 10.0, "points": 5}
    return [load("study").Study(store, servers=servers, **options) for servers in (1, 4)]


def rows_of(differences: dict[str, list[float]]) -> list[dict[str, str]]:
    """Rows of one table and one number of servers; asynchronous training has 50 points and one more each round."""
    return [
        {"label": label, "algorithm": algorithm, "round": str(number), "test_accuracy": str(50 + number + gain)}
        for label, values in differences.items()
        for number, difference in enumerate(values)
        for algorithm, gain in (("synchronous", -9.0), ("asynchronous", 0.0), ("smooth-switch", difference))
    ]


# ------------------------------------------------------------------------------------------------------------- the runs


def test_numbers_of_servers_and_algorithms_take_turns(load: Load) -> None:
    tables = [load("protocol").TABLES[number] for number in (1, 2)]
    cells = list(load("ray_servers").in_turn(studies(load), tables))
    turns = list(dict.fromkeys((cell.round, cell.dataset, cell.servers) for cell in cells))
    assert turns == [
        *((0, "mnist", 1), (0, "mnist", 4), (0, "cifar10", 4), (0, "cifar10", 1)),
        *((1, "mnist", 4), (1, "mnist", 1), (1, "cifar10", 1), (1, "cifar10", 4)),
    ]
    names = [cell.policy.partition(":")[0] for cell in cells if cell.dataset == "mnist" and cell.servers == 4]
    forwards = 2 * ["synchronous", "asynchronous", "smooth-switch", "smooth-switch"]
    assert names == [*forwards, *reversed(forwards)]  # what both step sizes share is run once
    assert {(cell.engine, cell.times, cell.seconds, cell.points) for cell in cells} == {("ray", "", 10.0, 5)}
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 8


def test_the_strategy_has_the_servers(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, said = load("cells"), []

    def train(_: object, strategy: str, **options: Any) -> None:
        said.append((strategy, options["out"] is not None))
        raise load("cells").NonFiniteError("as good as any other end")

    monkeypatch.setattr(cells, "train", train)
    for servers in (0, 4):
        assert cells.run(cells.Cell("synthetic", "asynchronous", servers=servers), {}).diverged
    assert said == [
        ("replicas=25 partition=disjoint aggregation=asynchronous", False),
        ("replicas=25 servers=4 partition=disjoint aggregation=asynchronous", True),
    ]


def test_runs_in_turn_share_one_engine(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, opened, made = load("cells"), [], []

    class Opened:
        def __enter__(self) -> str:
            opened.append(self)
            return "open"

        def __exit__(self, *_: object) -> None: ...

    def run(cell: Any, _: object, engine: str) -> Any:
        made.append((cell.policy, engine))
        return cells.Result(50.0, 1.0, 1.0, 10, 20, {}, usage=USAGE)

    monkeypatch.setattr(cells, "open_engine", lambda _: Opened())
    monkeypatch.setattr(cells, "run", run)
    store = cells.Store(tmp_path, {})
    wanted = [cells.Cell("mnist", policy, engine="ray") for policy in ("synchronous", "asynchronous")]
    store.make_in_turn([*wanted, wanted[0]], "ray")
    assert made == [(cell.policy, "open") for cell in wanted]
    store.make_in_turn(wanted, "ray")
    assert len(opened) == 1
    assert cells.Store(tmp_path, {})[wanted[0]].usage == USAGE


# ------------------------------------------------------------------------------------------------------- processor time


def test_usage_is_what_was_used_between_two_snapshots(load: Load) -> None:
    module = load("processor_time")
    one, other = ("coordinator", 10), ("server 1", 20)
    before = module.Snapshot(100.0, {one: 5 * 10**9}, {one: 10**9}, 40.0, 1.0, 50.0)
    # The second server's thread is new; it ran for 4 s and waited for 1 s, the first's for 2 s and 2 s.
    after = module.Snapshot(110.0, {one: 7 * 10**9, other: 4 * 10**9}, {one: 3 * 10**9, other: 10**9}, 50.0, 2.0, 70.0)
    expected = {"server_cores": 0.6, "replica_cores": 1.0, "rest_cores": 0.1, "other_cores": 0.3}
    expected |= {"server_running": 0.4, "server_ready": 0.1}
    assert module.usage(before, after) == pytest.approx(expected)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system has no /proc/…/schedstat")
def test_a_meter_reads_the_processes_of_a_run(load: Load) -> None:
    module = load("processor_time")
    with module.Meter(0.01) as meter:
        meter.out.mkdir()
        rows = [{"role": role, "pid": os.getpid()} for role in ("main", "coordinator", "server 1", "replica")]
        partial = meter.out / "partial"
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.rename(meter.out / "workers.json")
        meter._thread.join()
    assert tuple(meter.usage) == module.FIGURES
    assert min(meter.usage.values()) >= 0
    assert not meter.out.parent.exists()


def test_a_meter_of_a_run_that_never_began_has_nothing(load: Load) -> None:
    with load("processor_time").Meter(10.0) as meter:
        pass
    assert meter.usage == {}


# --------------------------------------------------------------------------------------------- the arithmetic, the page


def test_gains_are_paired_by_round(load: Load) -> None:
    # Together 1.5, 2 and 2.5: t(0.975, 2) · 0.5 / √3 = 1.2421.
    gains = load("ray_servers").Gains.of(rows_of({"a": [1, 2, 3], "b": [2, 2, 2]}), "test_accuracy")
    (first, _), (second, none), (together, half_width) = gains.columns()
    assert (first, second, none, together) == pytest.approx((2, 2, 0, 2))
    assert half_width == pytest.approx(1.2421, abs=1e-4)


def test_gains_are_subtracted_round_by_round(load: Load) -> None:
    few, many = (
        load("ray_servers").Gains.of(rows_of(found), "test_accuracy") for found in ({"a": [1, 5]}, {"a": [2, 6]})
    )
    (mean, half_width), _ = many.minus(few).columns()
    assert (mean, half_width) == pytest.approx((1, 0))


def test_loads_are_means_by_the_second(load: Load) -> None:
    row = {"gradients": "200", "updates": "100", "seconds": "10", "test_accuracy": "50", "last_threshold": "3"}
    measured = row | {name: str(value) for name, value in USAGE.items()}
    found = load("ray_servers").Load.of([measured, measured | {"gradients": "300"}])
    assert (found.gradients, found.updates, found.accuracy, found.threshold) == (25, 10, 50, 3)
    assert found.server_s == pytest.approx(0.5 / 25)
    assert math.isnan(load("ray_servers").Load.of([row | dict.fromkeys(USAGE, "")]).server_s)


def test_the_page_has_both_numbers_of_servers(load: Load, tmp_path: Path) -> None:
    cells, out = load("cells"), tmp_path / "out"
    store = cells.Store(tmp_path / "cache", {})
    for cell in load("ray_servers").in_turn(studies(load, store), [load("protocol").TABLES[1]]):
        gain = cell.servers * ("smooth" in cell.policy)
        curve = {"threshold": [1.0, 7.5]}
        result = cells.Result(70.0 + gain + cell.round / 10 * gain, 1.0, 1.0, 10, 20, curve, usage=USAGE)
        (tmp_path / "cache" / f"{cell.name}.json").write_text(
            json.dumps({"cell": asdict(cell), "result": asdict(result)})
        )
    where = ("--cache", str(tmp_path / "cache"), "--out", str(out))
    options = "--engine ray --servers 4 --servers 1 --table 1 --rounds 2 --seconds 10 --points 5 --other-cores 0.125"
    assert load("measure").main([*options.split(), *where]) == 0
    assert load("measure").main(["--page", *where]) == 0
    page = (out / "README.md").read_text(encoding="utf-8")
    # Gains of 1 and 1.1, and of 4 and 4.4: t(0.975, 1) · 0.0707 / √2 = 0.635, and so on.
    assert f"| test accuracy, points | 1 | {' | '.join(5 * ['+1.050 ± 0.635'])} |" in page
    assert f"| test accuracy, points | 4 less 1 | {' | '.join(5 * ['+3.150 ± 1.906'])} |" in page
    assert "| 1 | 4 | asynchronous | 70.00 | 2 | 1 | 7.5 | 40 % | 30 % | 0.50 | 1.25 | 0.12 | 250.00 |" in page
    assert "load average before a run: 9.0 to 9.0" in page
    assert "other programs had more than 0.125 cores were made again" in page
    assert f"{options.replace('--servers 4 --servers 1', '--servers 1 --servers 4')} --data DATA" in page


def test_the_published_section_is_what_its_sheet_gives(load: Load) -> None:
    results = FOLDER / "results"
    section = load("server_sections").server_counts(results)
    assert section.startswith("## One server of A, and several")
    assert section in (results / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--table 1 --servers 4", "--servers 4: the virtual engine has no servers to choose; write --engine ray too"),
        ("--table 1 --servers 4 --engine local", "the local engine has no servers to choose; write --engine ray too"),
        ("--page --servers 4 --engine ray", "--servers 4 is for tables alone; write --table 1 too"),
        ("--table 1 --other-cores 0.5", "--other-cores 0.5 is for runs with --servers N alone; write that too"),
        ("--table 3 --points 5", "--points 5: virtual time has the tables' own"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    words: str, says: str, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("measure").main([*words.split(), "--cache", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
