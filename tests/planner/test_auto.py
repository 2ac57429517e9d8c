"""strategy="auto": what is refused, what is said, and that it trains."""

from typing import Any

import pytest

import paceline
from paceline import Strategy, compare, launch, train
from paceline.api.train import check
from paceline.core.errors import InputError
from paceline.datasets import load_program
from paceline.planner.program import plans as auto
from paceline.planner.program.plans import Chosen, why
from paceline.strategy import is_auto
from tests.planner.test_by_pieces import plans
from tests.planner.test_probe import program


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """Chosen without a measurement."""
    strategy = Strategy(replicas=2, threads=1)
    monkeypatch.setattr(auto, "choose", lambda program, tell: Chosen(strategy, "auto: because"))
    return strategy


def test_it_trains_with_what_is_chosen_and_says_so(chosen: Strategy, capfd: pytest.CaptureFixture[str]) -> None:
    run = train(program(), "auto", steps=2, progress=False)
    assert run.strategy == chosen
    assert run.summary["gradients"] == 4
    assert capfd.readouterr().err.count("auto: because\n") == 1


def test_loops_and_comparisons_take_it(chosen: Strategy) -> None:
    def loop(worker: Any) -> None:
        for batch in worker.batches():
            worker.step(batch)

    assert launch(loop, program(), "auto", steps=2, progress=False).strategy == chosen
    words: dict[str, Any] = {"steps": 2, "progress": False}
    assert list(compare(program(), ["auto", "replicas=1"], **words).runs) == [str(chosen), "replicas=1"]
    same = compare(program(), ["auto", str(chosen), "replicas=1"], baseline="auto", **words)
    assert list(same.runs) == [str(chosen), "replicas=1"]  # compared once
    assert same.baseline == str(chosen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"engine": "virtual"}, "engine=virtual has a time of its own; write engine=local"),
        ({"engine": "distributed"}, "on each rank by itself; run paceline plan once"),
        (
            {"strategy": "auto device=cuda"},
            "auto chooses every field, and measures this host's cores; write auto alone",
        ),
        ({"seconds": 1}, "one budget"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(words: dict[str, Any], message: str, chosen: Strategy) -> None:
    given = {"strategy": "auto", "steps": 2} | words
    with pytest.raises(InputError, match=message):
        check(program(), **given)
    with pytest.raises(InputError, match=message):
        train(program(), progress=False, **given)


def test_elsewhere_it_is_no_strategy() -> None:
    assert is_auto(" auto ")
    assert not is_auto("autos=1")
    with pytest.raises(InputError, match="chosen for a program, by train, compare and launch"):
        Strategy.parse("auto")
    with pytest.raises(InputError, match="chosen for a program"):
        paceline.show_mesh("auto")


def test_the_line_says_what_was_chosen_and_beside_what() -> None:
    ranked = sorted(plans(), key=lambda plan: -plan.samples_per_s)
    line = why(ranked)
    assert line.startswith(f"auto: {ranked[0].strategy}: {ranked[0].samples_per_s:,.0f} samples/s are predicted, ")
    assert f"times {ranked[1].strategy}'s" in line
    assert "\n" not in line
    assert why(ranked[:1]).endswith("samples/s are predicted")


@pytest.mark.timeout(240.0)  # processes that each import torch, on however few cores there are
def test_a_built_in_program_trains_without_any_other_option(capfd: pytest.CaptureFixture[str]) -> None:
    run = train(load_program("synthetic"), "auto", steps=2, progress=False)
    assert isinstance(run.strategy, Strategy)
    assert run.summary["steps"] == 2
    assert f"auto: {run.strategy}: " in capfd.readouterr().err
