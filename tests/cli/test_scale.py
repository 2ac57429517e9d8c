"""``paceline scale``: another shell adds replicas to a run, and takes some away."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.safe_files import write_json
from paceline.engine.scaling import ANSWER, REQUEST
from tests.engine.local.commands import Command, command, eventually


def scale(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from paceline.cli.main import main; main()", "scale", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_run_is_scaled_up_and_down(tmp_path: Path) -> None:
    with command(tmp_path, "--strategy", "replicas=1..3", "--steps", "100000000") as running:
        scale_up_and_down(running)


def scale_up_and_down(command: Command) -> None:
    def replicas() -> set[int]:
        return {row["replica"] for row in command.roster() if row["role"] == "replica"}

    command.until("training")
    for count in (3, 1, 2):
        done = scale(str(command.out), f"replicas={count}", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["replicas"] == count
        eventually(lambda count=count: len(replicas()) == count)
    refused = scale(str(command.out), "replicas=4")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "replicas=4 is out of its bounds, replicas=1..3; write one from 1 to 3" in refused.stderr
    command.process.send_signal(signal.SIGINT)
    code, result, err = command.ended()
    assert code == 130, err
    assert result["left"] == []
    assert len(result["summary"]["utilisation"]) == 3
    assert not {REQUEST, ANSWER} & {path.name for path in command.out.iterdir()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("replicas=4",), "no run is under way in"),
        (("replicas",), "'replicas' is no number of replicas; write replicas=6"),
        (("workers=4",), "'workers=4' is no number of replicas; write replicas=6"),
        (("replicas=-1",), "'replicas=-1' is no number of replicas"),
    ],
)
def test_what_can_not_be_asked(invoke: Any, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = invoke("scale", tmp_path, *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_run_that_was_killed_does_not_answer(invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of workers has stayed behind."""
    write_json(tmp_path / "workers.json", [])
    monkeypatch.setattr("paceline.engine.scaling.scale.__defaults__", (0.2,))
    done = invoke("scale", tmp_path, "replicas=2")
    assert done.exit_code == 1
    assert "has not answered within 0.2 s" in " ".join(done.stderr.split())
