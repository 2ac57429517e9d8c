"""How commands end: exit codes, what goes to stderr, and a clean stdout."""

import json
import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

import paceline
from paceline.core.errors import InputError, NonFiniteError, PacelineError, WaitTimeoutError, WorkerError

LONG = "replicas=0 must be at least 1, " * 10 + "write replicas=1"


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError, 2), (PacelineError, 1), (WorkerError, 1), (NonFiniteError, 1), (WaitTimeoutError, 1)],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_is_one_message_on_stderr_and_an_exit_code(
    invoke: Any, calls: Any, error: type[PacelineError], code: int, flags: list[str]
) -> None:
    calls.results["train"] = error(LONG)
    done = invoke("train", "digits", *flags)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"error: {LONG}\n")


def test_an_error_in_the_program_is_reported_the_same_way(invoke: Any, calls: Any) -> None:
    calls.results["load_program"] = InputError("unknown program 'digit'; did you mean 'digits'?")
    done = invoke("compare", "own:digit", "--strategy", "replicas=2")
    assert (done.exit_code, done.stderr) == (2, "error: unknown program 'digit'; did you mean 'digits'?\n")


def test_the_traceback_is_printed_on_request(invoke: Any, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    calls.results["train"] = WorkerError("replica 3 failed")
    done = invoke("train", "digits")
    assert done.exit_code == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("error: replica 3 failed\n")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_interruption_before_there_is_a_result_ends_with_130(invoke: Any, calls: Any, flags: list[str]) -> None:
    calls.results["train"] = KeyboardInterrupt()
    done = invoke("train", "digits", *flags)
    assert (done.exit_code, done.stdout) == (130, "")
    assert "interrupted" in done.stderr


def test_a_defect_of_our_own_keeps_its_traceback(invoke: Any, calls: Any) -> None:
    calls.results["train"] = ZeroDivisionError("ours")
    assert isinstance(invoke("train", "digits").exception, ZeroDivisionError)


@pytest.mark.parametrize(("word", "buffered"), [("--version", ""), ("--help", "1")])
def test_what_stdout_has_no_room_for_is_one_message_and_an_exit_code(word: str, buffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", word], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: stdout can't be written: No space left on device\n")


def test_what_the_program_prints_does_not_join_the_json(
    invoke: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, **__: Any) -> Any:
        print("from the program")
        return calls.results["train"]

    monkeypatch.setattr(import_module("paceline.api.train"), "train", train)
    done = invoke("train", "digits", "--json")
    assert json.loads(done.stdout)["engine"] == "local"
    assert done.stderr == "from the program\n"


def test_without_a_command_the_help_lists_them_all(invoke: Any) -> None:
    text = invoke("--help").stdout
    assert all(command in text for command in ("train", "compare", "trace", "report"))


def test_version(invoke: Any) -> None:
    assert invoke("--version").stdout == f"{paceline.__version__}\n"
