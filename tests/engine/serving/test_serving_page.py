"""The program of docs/own-loops.md that is a server or joins one, and the command that serves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paceline
from tests.engine import own_loops
from tests.engine.local.commands import eventually
from tests.engine.serving.serving_cases import gradient_step

PAGE = (Path(__file__).parents[3] / "docs" / "own-loops.md").read_text("utf-8")
COMMAND = (sys.executable, "-c", "from paceline.cli.main import main; main()")

PROGRAM = """
from paceline import Program
from tests.engine.own_loops import SGD, make_model

program = Program(model=make_model, optimizer=SGD)
"""

WITHIN_S = 240.0
"""For a process that ends by itself, on a busy machine."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts commands in the test's folder, which end with it."""
    started = list[subprocess.Popen[str]]()

    def begin(*words: str) -> "subprocess.Popen[str]":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for each in started:
        if each.poll() is None:
            each.kill()
            each.communicate()


def output(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, err
    return out


def test_the_program_of_the_page_serves_and_joins(start: Start, tmp_path: Path) -> None:
    [code] = re.findall(r"^```py\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "train.py").write_text(code, "utf-8")
    server = start(sys.executable, "train.py", "serve")
    eventually(lambda: (tmp_path / "runs" / "a" / "server.json").exists() or server.poll() is not None)
    assert re.fullmatch(r"replica \d has left\n", output(start(sys.executable, "train.py", "join")))
    assert output(server) == "16 updates\n"


def test_the_command_serves(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, "utf-8")
    server = start(*COMMAND, "serve", "train.py:program", "replicas=1..3", "--out", "runs/a", "--steps", "9", "--json")
    folder = tmp_path / "runs" / "a"
    eventually(lambda: (folder / "server.json").exists() or server.poll() is not None)
    scaled = start(*COMMAND, "scale", "runs/a", "replicas=2")
    _, err = scaled.communicate(timeout=WITHIN_S)
    assert scaled.returncode == 2
    assert "let processes join it" in " ".join(err.split())
    program = paceline.Program(model=own_loops.make_model, optimizer=own_loops.SGD)
    with paceline.join(program, address=folder) as worker:
        own = own_loops.loader(own_loops.BATCH)
        for batch in [*worker.data(own), *worker.data(own)]:
            gradient_step(worker.model, batch)
            worker.optimizer.step()
    result = json.loads(output(server))
    assert (result["engine"], result["summary"]["updates"]) == ("serving", 9)
    assert not (folder / "server.json").exists()


def test_the_command_ends_by_ctrl_c(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, "utf-8")
    server = start(*COMMAND, "serve", "train.py:program", "--out", "runs/a")
    eventually(lambda: (tmp_path / "runs" / "a" / "server.json").exists() or server.poll() is not None)
    server.send_signal(signal.SIGINT)
    _, err = server.communicate(timeout=WITHIN_S)
    assert (server.returncode, "interrupted" in err) == (130, True), err
