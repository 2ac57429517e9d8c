"""``paceline share``: what it asks for, and what it prints."""

import json
from pathlib import Path
from typing import Any

from paceline.cli.options import DEFAULT_SECONDS


def test_programs_and_options_reach_share_workers(invoke: Any, calls: Any) -> None:
    words = ("--strategy", "replicas=2", "--scheduler", "cyclic", "--slice-steps", "50", "--until", "test_loss<=0.2")
    done = invoke("share", "digits", "models:wide", *words, "--loss", "test_loss", "--seed", "5")
    assert done.exit_code == 0, done.stderr
    args, keywords = calls.of("share_workers")
    assert args == ({"digits": "the program", "models:wide": "the program"}, "replicas=2")
    assert (keywords["scheduler"], keywords["slice_steps"], keywords["loss"]) == ("cyclic", 50, "test_loss")
    assert (keywords["until"], keywords["seed"], keywords["seconds"]) == ("test_loss<=0.2", 5, None)
    assert (keywords["checkpoint"], keywords["resume"]) == (None, False)
    assert [call[2]["seed"] for call in calls.made if call[0] == "load_program"] == [5, 5]
    assert done.stdout == "the table of jobs\n"


def test_it_goes_on_from_a_folder(invoke: Any, calls: Any) -> None:
    assert invoke("share", "digits", "mnist", "--checkpoint", "ckpt", "--resume").exit_code == 0
    keywords = calls.of("share_workers")[1]
    assert (keywords["checkpoint"], keywords["resume"]) == (Path("ckpt"), True)
    assert (keywords["seconds"], keywords["seed"]) == (DEFAULT_SECONDS, 0)


def test_json_is_one_object_and_nothing_else(invoke: Any, calls: Any) -> None:
    done = invoke("share", "digits", "mnist", "--json")
    assert json.loads(done.stdout) == calls.results["share_workers"].to_json()
    assert done.stdout.count("\n") == 1


def test_an_interrupted_share_is_printed_and_ends_with_its_signal(invoke: Any, calls: Any) -> None:
    calls.results["share_workers"].interrupted = True
    calls.results["share_workers"].signal = "SIGTERM"
    done = invoke("share", "digits", "mnist")
    assert done.exit_code == 143
    assert done.stdout.startswith("the table")


def test_a_program_that_is_given_twice_is_refused(invoke: Any, calls: Any) -> None:
    done = invoke("share", "digits", "digits")
    assert done.exit_code == 2
    assert "digits is given twice; write it once" in done.stderr
    assert calls.made == []


def test_without_a_program_there_is_nothing_to_share(invoke: Any, calls: Any) -> None:
    assert invoke("share").exit_code == 2
    assert calls.made == []
