"""compare: the order of runs, every refusal before the first, and what is kept; its engine is a stand-in."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.api.compare import compare
from paceline.comparison import Comparison, load_comparison, run_folder
from paceline.core.errors import InputError, PacelineError
from paceline.core.records import Record, ReplicaExit
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.program import Program
from paceline.run import Run, load
from paceline.strategy import Strategy

A, B, C = "replicas=2", "replicas=2 aggregation=asynchronous", "replicas=2 aggregation=buffered:k=2"
PROGRAM = Program(
    lambda: nn.Linear(2, 2),
    nn.functional.mse_loss,
    lambda p: torch.optim.SGD(p, lr=0.1),
    (torch.zeros(2, 2),) * 2,
    seed=7,
)


class NoEngine(Engine):
    name = "none"

    def refuse(self, job: Job) -> None:
        raise NotImplementedError

    def run(self, job: Job, watch: Watcher) -> Outcome:
        raise NotImplementedError


@dataclass
class World:
    """What stands in for ``paceline.train``: notes calls, returns runs whose figures follow from seed and strategy."""

    calls: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    stop_at: int | None = None
    stop_by: str = "summary"
    digest_of: str | None = None
    refused: str | None = None
    opened: list[Any] = field(default_factory=list[Any])

    def check(self, program: Program, strategy: Strategy, *, engine: str | Engine, **budget: Any) -> None:
        self.calls.append(("check", program.seed, str(strategy), engine, budget))
        if str(strategy) == self.refused:
            raise InputError(f"{strategy} can't be carried")

    def open_engine(self, name: str) -> Engine:
        self.calls.append(("open", name))
        self.opened.append(NoEngine())
        return self.opened[-1]  # type: ignore[no-any-return]

    def train(self, program: Program, strategy: Strategy, *, engine: Engine, **budget: Any) -> Run:
        assert isinstance(engine, NoEngine)
        self.calls.append(("train", program.seed, str(strategy), budget))
        stopped = len(self.trained) - 1 == self.stop_at
        if stopped and self.stop_by == "raise":
            raise KeyboardInterrupt
        digest = "other" if self.digest_of == str(strategy) else f"digest {program.seed}"
        return make_run(strategy, program.seed, interrupted=stopped, start_digest=digest)

    @property
    def trained(self) -> list[tuple[int, str]]:
        return [(call[1], call[2]) for call in self.calls if call[0] == "train"]


def make_run(strategy: Strategy, seed: int, **changes: Any) -> Run:
    """Accuracy 0.6, and 0.1 more under asynchronous, 0.2 more under others; 0.01 more for each seed above 7."""
    gain = 0.0 if "aggregation" not in str(strategy) else 0.1 if "asynchronous" in str(strategy) else 0.2
    accuracy = 0.6 + gain + 0.01 * (seed - 7)
    summary = {
        "updates": 100 + seed,
        "seconds": 1.0,
        "gradients_per_s": 200.0,
        "staleness_mean": 1.5,
        "test_accuracy": accuracy + 0.1,
        "test_accuracy_mean": accuracy,
        "test_loss_mean": 1 - accuracy,
        "train_loss_mean": 0.9 - accuracy,
        "interrupted": False,
        "start_digest": f"digest {seed}",
    }
    history = [Record(0.0, 0, 0, 1, None, 2.3, 2.4, 0.1), Record(1.0, 9, 9, 1, 0.5, 0.3, 0.4, accuracy)]
    left = [ReplicaExit(1, "killed by SIGKILL", 0.5)] if seed == 8 else []
    return Run("digits", strategy, "none", {"w": torch.ones(2)}, summary | changes, history, left)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for name in ("check", "train"):
        monkeypatch.setattr(sys.modules["paceline.api.compare"], name, getattr(made, name))
    monkeypatch.setattr(sys.modules["paceline.api.train"], "open_engine", made.open_engine)
    return made


def example(rounds: int = 2) -> Comparison:
    return Comparison({text: [make_run(Strategy.parse(text), 7 + r) for r in range(rounds)] for text in (A, B, C)}, B)


# ---------------------------------------------------------------------------------------------------------- what is run


def test_round_by_round_strategies_in_turn_from_one_seed_each(world: World) -> None:
    found = compare(PROGRAM, [A, B], rounds=3, seconds=5)
    assert world.trained == [(7, A), (7, B), (8, A), (8, B), (9, A), (9, B)]
    assert found.strategies == [A, B]
    assert [run.summary["updates"] for run in found.runs[B]] == [107, 108, 109]
    assert (found.baseline, found.interrupted) == (A, False)


def test_all_is_checked_before_the_engine_opens_and_the_first_run_begins(world: World) -> None:
    compare(PROGRAM, [A, B], rounds=2, seconds=5, delay="x", progress=False)
    budget = {"seconds": 5, "delay": "x"}
    assert [call[0] for call in world.calls] == ["check", "check", "open", *["train"] * 4]
    assert world.calls[1] == ("check", 7, B, "local", budget)
    assert world.calls[-1] == ("train", 8, B, budget | {"progress": False})


def test_a_refusal_of_the_last_strategy_comes_before_the_first_run(world: World) -> None:
    world.refused = C
    with pytest.raises(InputError, match="can't be carried"):
        compare(PROGRAM, [A, B, C], seconds=5)
    assert world.trained == []
    assert world.opened == []


def test_an_open_engine_is_used_and_left_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoEngine, "close", lambda self: pytest.fail("closed"))
    compare(PROGRAM, [A], engine=NoEngine(), seconds=5)
    assert "open" not in [call[0] for call in world.calls]


def test_an_engine_it_opened_is_closed_also_when_a_run_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Engine] = []

    def close(self: Engine) -> None:
        closed.append(self)

    monkeypatch.setattr(NoEngine, "close", close)
    world.digest_of = B
    with pytest.raises(PacelineError, match="round 0 did not start all strategies from the same A_0"):
        compare(PROGRAM, [A, B], seconds=5)
    assert closed == world.opened


@pytest.mark.parametrize(
    ("strategies", "options", "message"),
    [
        ([], {}, "at least one"),
        (A, {}, r"\['replicas=8'\]"),
        ([A, B, "aggregation=asynchronous  replicas=2"], {}, "given twice"),
        ([A, "replicas=2 aggregation=asynchronos"], {}, "asynchronous"),
        ([A, B], {"rounds": 0}, "rounds=0"),
        ([A, B], {"rounds": 1.5}, "rounds=1.5"),
        ([A, B], {"rounds": True}, "rounds=True"),
        ([A, B], {"baseline": "replicas=2 aggregation=asynchron"}, f"did you mean '{B}'"),
        ([A, B], {"baseline": C}, "unknown baseline"),
        ([A, "replicas=2 aggregation=smooth-switch:combine=sum"], {}, f"{A}.* by mean and .*sum.* by sum"),
        (["replicas=2 aggregation=buffered:k=2,combine=sum", "aggregation=local-steps"], {}, "one rule"),
        ([A, B], {"tensorboard": True}, "out='runs/c'"),
    ],
)
def test_what_can_not_be_compared_is_refused_before_anything(
    world: World, strategies: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        compare(PROGRAM, strategies, seconds=5, **options)
    assert world.calls == []


def test_a_policy_without_a_rule_of_its_own_may_join_any(world: World) -> None:
    summed = "replicas=2 aggregation=buffered:k=2,combine=sum"
    assert compare(PROGRAM, [summed, "replicas=2 aggregation=hogwild"], seconds=5).strategies[0] == summed


def test_an_out_folder_that_exists_is_refused_before_anything(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        compare(PROGRAM, [A], seconds=5, out=tmp_path)
    assert world.calls == []


def test_strategies_and_baseline_may_be_values_or_any_spelling(world: World) -> None:
    found = compare(PROGRAM, [Strategy.parse(A), B], seconds=5, baseline="aggregation=asynchronous replicas=2")
    assert (found.strategies, found.baseline) == ([A, B], B)
    assert compare(PROGRAM, [A, B], seconds=5, baseline=Strategy.parse(B)).baseline == B


# --------------------------------------------------------------------------------------------------------- interruption


@pytest.mark.parametrize("by", ["summary", "raise"])
def test_an_interrupt_keeps_what_is_complete(world: World, tmp_path: Path, by: str) -> None:
    world.stop_at, world.stop_by = 3, by
    found = compare(PROGRAM, [A, B, C], rounds=5, seconds=5, out=tmp_path / "c")
    assert found.interrupted
    assert {text: len(runs) for text, runs in found.runs.items()} == {A: 1, B: 1, C: 1}
    assert len(world.trained) == 4
    assert load_comparison(tmp_path / "c").to_json() == found.to_json()


def test_an_interrupt_within_a_round_leaves_strategies_without_runs(world: World) -> None:
    world.stop_at = 1
    found = compare(PROGRAM, [A, B], seconds=5)
    assert (len(found.runs[A]), found.runs[B], found.mean[B]) == (1, [], {})
    assert found.difference == {B: dict.fromkeys(["test_accuracy_mean", "test_loss_mean", "train_loss_mean"])}
    assert "asynchronous" in found.table()


def test_an_interrupt_before_any_result_goes_on(world: World, tmp_path: Path) -> None:
    world.stop_at = 0
    with pytest.raises(KeyboardInterrupt):
        compare(PROGRAM, [A, B], seconds=5, out=tmp_path / "c")
    [folder] = (tmp_path / "c").iterdir()
    assert os.listdir(folder) == ["round-0-interrupted"]
    assert load(folder / "round-0-interrupted").summary["interrupted"]


def test_each_run_is_saved_before_the_next_begins(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def train(*args: Any, **options: Any) -> Run:
        file = tmp_path / "c" / "comparison.json"
        saved.append(sum(len(e["rounds"]) for e in json.loads(file.read_text())["strategies"]) if file.exists() else 0)
        return world.train(*args, **options)

    monkeypatch.setattr(sys.modules["paceline.api.compare"], "train", train)
    found = compare(PROGRAM, [A, B], rounds=2, seconds=5, out=tmp_path / "c")
    assert saved == [0, 1, 2, 3]
    assert load_comparison(tmp_path / "c").to_json() == found.to_json()


# -------------------------------------------------------------------------------------------------------------- figures


def test_mean_and_difference() -> None:
    found = example()
    assert found.mean[A]["test_accuracy_mean"] == pytest.approx(0.605)
    assert list(found.difference) == [A, C]
    gain = found.difference[C]["test_accuracy_mean"]
    assert gain is not None
    assert (gain.mean, gain.rounds) == (pytest.approx(0.1), 2)
    loss = found.difference[A]["train_loss_mean"]
    assert loss is not None
    assert loss.mean == pytest.approx(0.1)


def test_the_table() -> None:
    expected = """
              ──────test accuracy, %─────  ────mean over time───
strategy        end   mean     difference  test loss  train loss  updates  gradients/s  staleness
synchronous   70.50  60.50  -10.00 ± 0.00     0.3950      0.2950      108          200       1.50
asynchronous  80.50  70.50       baseline     0.2950      0.1950      108          200       1.50
buffered:k=2  90.50  80.50  +10.00 ± 0.00     0.1950      0.0950      108          200       1.50"""
    head, table = example().table().split("\n", 1)
    assert table == expected
    assert head == (
        "2 rounds; difference: of the mean over time, in points, against asynchronous, ± half a 95 % interval"
    )


def test_the_table_of_one_strategy_compares_it_with_nothing() -> None:
    table = Comparison({A: example().runs[A]}, A).table()
    assert table.startswith("2 rounds of one strategy: there is nothing to compare it with\n")
    assert "difference" not in table
    assert "baseline" not in table


def test_the_table_against_another_baseline() -> None:
    lines = example(rounds=1).table(baseline="aggregation=synchronous replicas=2").splitlines()
    assert lines[0] == "1 round; difference: of the mean over time, in points, against synchronous"
    assert "baseline" in lines[4]
    assert "+20.00 " in lines[6]
    with pytest.raises(InputError, match="unknown baseline"):
        example().table(baseline="replicas=3")


# ------------------------------------------------------------------------------------------------------- JSON and files


def test_json_has_exactly_the_keys_of_the_command_line() -> None:
    found = example().to_json()
    assert list(found) == ["strategies", "baseline", "difference"]
    assert [list(entry) for entry in found["strategies"]] == [["strategy", "rounds", "mean"]] * 3
    assert [list(entry["rounds"][1]) for entry in found["strategies"]] == [["summary", "history", "left"]] * 3
    assert (found["strategies"][1]["strategy"], found["baseline"]) == (B, B)
    keys = ["mean", "standard_error", "low", "high", "rounds"]
    assert {t: list(m["test_loss_mean"]) for t, m in found["difference"].items()} == {A: keys, C: keys}
    json.dumps(found, allow_nan=False)


def test_a_saved_comparison_comes_back(tmp_path: Path) -> None:
    saved = example()
    saved.save(tmp_path / "c")
    back = load_comparison(tmp_path / "c")
    assert back.to_json() == saved.to_json()
    assert back.table() == saved.table()
    assert back.runs[A][1].left == [ReplicaExit(1, "killed by SIGKILL", 0.5)]
    assert os.listdir(tmp_path) == ["c"]


def test_where_its_files_lie(tmp_path: Path) -> None:
    example(rounds=1).save(tmp_path / "c")
    folders = ["0-replicas-2", "1-replicas-2-aggregation-asynchronous", "2-replicas-2-aggregation-buffered-k-2"]
    assert sorted(os.listdir(tmp_path / "c")) == [*folders, "comparison.json"]
    assert os.listdir(tmp_path / "c" / folders[1]) == ["round-0"]
    assert json.loads((tmp_path / "c" / "comparison.json").read_text()) == example(rounds=1).to_json()


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("paceline.run.save_state", fail)
    with pytest.raises(InputError, match="no space"):
        example().save(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_a_comparison_is_no_run_but_holds_some(tmp_path: Path) -> None:
    example(rounds=1).save(tmp_path / "c")
    with pytest.raises(InputError, match=r"holds a comparison.*0-replicas-2/round-0"):
        load(tmp_path / "c")
    assert str(load(tmp_path / "c" / "0-replicas-2" / "round-0").strategy) == A


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"strategies": [{"strategy": 1}], "baseline": "x"}'])
def test_a_damaged_comparison_is_named(tmp_path: Path, damage: str) -> None:
    example().save(tmp_path / "c")
    (tmp_path / "c" / "comparison.json").write_text(damage)
    with pytest.raises(InputError, match=r"comparison\.json"):
        load_comparison(tmp_path / "c")


def test_a_run_that_is_gone_is_named(tmp_path: Path) -> None:
    example().save(tmp_path / "c")
    (tmp_path / "c" / "0-replicas-2" / "round-1" / "history.csv").unlink()
    with pytest.raises(InputError, match=r"0-replicas-2/round-1/history\.csv"):
        load_comparison(tmp_path / "c")


@pytest.mark.parametrize("text", ["", "../..", "a/b", "x" * 500, "<lambda>"])
def test_a_folder_name_is_one_plain_name(text: str) -> None:
    folder, round_, *rest = run_folder(3, text, 0).split("/")
    assert (round_, rest) == ("round-0", [])
    assert folder.startswith("3-")
    assert 0 < len(folder) - 2 <= 80
