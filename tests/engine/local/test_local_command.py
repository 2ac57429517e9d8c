"""The command, killed and interrupted from outside: nothing of it stays behind."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.engine.local.commands import Command, command, eventually

WITHIN_S = 5.0
"""The bound that the design sets for workers whose main process is gone."""


def assert_saved(it: Command, *, interrupted: bool) -> None:
    summary = json.loads((it.out / "summary.json").read_text())
    assert summary["interrupted"] is interrupted
    assert (it.out / "model.safetensors").stat().st_size > 0


# ------------------------------------------------------------------------------------------------------ main is killed


def test_main_killed_while_it_trains(tmp_path: Path) -> None:
    with command(tmp_path) as it:
        it.until("training")
        assert {row["role"] for row in it.roster()} == {"coordinator", "scorer", "replica"}
        it.know_family()
        it.process.kill()
        it.assert_nothing_left(WITHIN_S)
        assert not it.out.exists()
        code, _, said = it.ended()
        assert code == -signal.SIGKILL
        assert re.search(r"replica \d ends at its step \d+, for the main process was killed", said)


def test_main_killed_while_it_starts(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    with command(tmp_path) as it:
        eventually(lambda: it.children() == 4)
        it.know_family()
        it.process.kill()
        it.assert_nothing_left(WITHIN_S)
        assert not it.out.exists()


def test_main_killed_with_a_worker_stopped(tmp_path: Path) -> None:
    """A stopped worker can't look after itself: the fork server ends it."""
    with command(tmp_path) as it:
        it.until("training")
        os.kill(it.pid("replica", 0), signal.SIGSTOP)
        it.know_family()
        it.process.kill()
        it.assert_nothing_left(WITHIN_S)


def test_the_fork_server_and_then_main(tmp_path: Path) -> None:
    with command(tmp_path) as it:
        it.until("training")
        it.know_family()
        os.kill(it.fork_server(), signal.SIGKILL)
        it.process.kill()
        it.assert_nothing_left(WITHIN_S)
        assert not it.out.exists()


# -------------------------------------------------------------------------------------------------- a worker is killed


def test_a_worker_killed_leaves_the_exit_code_at_0(tmp_path: Path) -> None:
    with command(tmp_path, "--seconds", "3") as it:
        it.until("training")
        it.know_family()
        os.kill(it.pid("replica", 1), signal.SIGKILL)
        code, printed, err = it.ended()
        assert code == 0, err
        assert [(d["replica"], d["reason"]) for d in printed["left"]] == [(1, "killed by SIGKILL")]
        assert printed["summary"]["seconds"] == 3
        assert "Traceback" not in err
        assert_saved(it, interrupted=False)
        it.assert_nothing_left(0)  # the command has waited for them itself


def test_all_workers_killed_is_an_error_in_words(tmp_path: Path) -> None:
    with command(tmp_path) as it:
        it.until("training")
        it.know_family()
        for replica in (0, 1):
            os.kill(it.pid("replica", replica), signal.SIGKILL)
        code, printed, err = it.ended()
        assert (code, printed) == (1, None)
        assert err.startswith("error: every replica died: ")
        it.assert_nothing_left(0)
        assert not it.out.exists()


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_at_the_terminal_and_a_scheduler(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    """They reach the whole group."""
    with command(tmp_path) as it:
        it.until("training")
        it.know_family()
        os.killpg(it.process.pid, number)
        code, printed, err = it.ended()
        assert code == expected, err
        assert (printed["summary"]["interrupted"], printed["summary"]["signal"]) == (True, number.name)
        assert printed["left"] == []
        assert "Traceback" not in err
        assert_saved(it, interrupted=True)
        it.assert_nothing_left(0)


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    """Workers and scorer never have a model: the first one ends the workers, the second one the scorer."""
    (tmp_path / "hang").touch()
    with command(tmp_path) as it:
        eventually(lambda: it.children() == 4)
        it.know_family()
        it.process.send_signal(signal.SIGINT)
        eventually(lambda: it.living == 2)
        it.process.send_signal(signal.SIGINT)
        code, printed, err = it.ended()
        assert code == 130, err
        assert printed["summary"]["interrupted"]
        assert "Traceback" not in err
        assert_saved(it, interrupted=True)
        it.assert_nothing_left(0)
