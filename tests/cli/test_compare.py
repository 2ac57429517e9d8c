"""``paceline compare``: what it asks for, what it prints, and its report."""

import json
from pathlib import Path
from typing import Any

from paceline.cli.options import DEFAULT_SECONDS

TWO = ("--strategy", "replicas=2", "--strategy", "replicas=2 aggregation=asynchronous")


def test_strategies_rounds_and_baseline_reach_compare(invoke: Any, calls: Any) -> None:
    done = invoke("compare", "digits", *TWO, "--rounds", "3", "--baseline", "replicas=2", "--seed", "5")
    assert done.exit_code == 0
    args, keywords = calls.of("compare")
    assert args == ("the program", ["replicas=2", "replicas=2 aggregation=asynchronous"])
    assert (keywords["rounds"], keywords["baseline"], keywords["seconds"]) == (3, "replicas=2", DEFAULT_SECONDS)
    assert calls.of("load_program")[1]["seed"] == 5
    assert done.stdout == "the table against replicas=2\n"


def test_without_a_folder_there_is_no_report(invoke: Any, calls: Any) -> None:
    assert invoke("compare", "digits", *TWO).exit_code == 0
    assert "write_report" not in [name for name, _, _ in calls.made]


def test_with_a_folder_the_report_lies_in_it(invoke: Any, calls: Any) -> None:
    done = invoke("compare", "digits", *TWO, "--out", "runs/c")
    assert calls.of("compare")[1]["out"] == Path("runs/c")
    assert calls.of("write_report") == (([Path("runs/c")], Path("runs/c/report.html")), {})
    assert done.stdout.endswith("Report: runs/c/report.html\n")


def test_json_is_one_object_and_nothing_else(invoke: Any, calls: Any) -> None:
    done = invoke("compare", "digits", *TWO, "--json", "--out", "runs/c")
    assert json.loads(done.stdout) == calls.results["compare"].to_json()
    assert done.stdout.count("\n") == 1


def test_an_interrupted_comparison_is_printed_and_ends_with_130(invoke: Any, calls: Any) -> None:
    calls.results["compare"].interrupted = True
    done = invoke("compare", "digits", *TWO)
    assert done.exit_code == 130
    assert done.stdout.startswith("the table")


def test_without_a_strategy_there_is_nothing_to_compare(invoke: Any, calls: Any) -> None:
    done = invoke("compare", "digits")
    assert done.exit_code == 2
    assert "--strategy" in done.stderr
    assert calls.made == []
