"""Paceline as users start it: a process of its own, which a test may kill."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from paceline.comm import liveness

PROGRAM = """
import functools, os, signal, sys, torch
from pathlib import Path
from paceline import Program

HERE = Path(__file__).parent

def elsewhere():  # asked when it matters: a file's functions travel to workers with the globals that they had in main
    return getattr(sys.modules["__main__"], "__file__", "").endswith("fork_server_main.py")

def mark(name):
    if elsewhere():
        (HERE / name).touch()

def model():
    mark("building")
    if elsewhere() and (HERE / "hang").exists():
        while True:
            signal.pause()
    return torch.nn.Linear(4, 3)

def loss(output, target):
    if torch.is_grad_enabled():
        mark("training")
    return torch.nn.functional.cross_entropy(output, target)

def accuracy(output, target):
    mark("scoring")
    return (output.argmax(-1) == target).double().mean()

inputs, targets = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
program = Program(model=model, loss=loss, batch_size=4, metrics={"accuracy": accuracy},
                  optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(inputs, targets), test=(inputs, targets))
"""

PATIENCE_S = 60.0


def eventually(condition: Callable[[], Any]) -> None:
    """Wait until something is so; fail where it is not within a minute."""
    deadline, never = time.monotonic() + PATIENCE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        never.wait(0.02)


class Command:
    """``paceline train`` of :data:`PROGRAM` on two workers, saved in ``out``; without end but for the words given."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.out = folder, folder / "runs" / "a"
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        (folder / "tmp").mkdir()
        budget = words or ("--steps", "100000000")
        command = ["train", f"{folder / 'program.py'}:program", "--strategy", "replicas=2", "--out", str(self.out)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from paceline.cli.main import main; main()", *command, *budget, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Torch itself makes an empty folder for its compiler.
            env=os.environ | {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
            start_new_session=True,  # a group of its own, as a shell gives its jobs
        )
        self._pidfds: dict[int, int] = {}

    def until(self, mark: str) -> None:
        """Wait until a process that it has started is at something."""
        eventually(lambda: (self.folder / mark).exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def roster(self) -> list[dict[str, Any]]:
        """Once it is written."""
        self.until("runs/a/workers.json")
        rows: list[dict[str, Any]] = json.loads((self.out / "workers.json").read_text())
        return rows

    def pid(self, role: str, replica: int | None = None) -> int:
        return next(int(r["pid"]) for r in self.roster() if r["role"] == role and r.get("replica") == replica)

    def fork_server(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def children(self) -> int:
        """How many processes it has now."""
        return len(psutil.Process(self.process.pid).children(recursive=True))

    def know_family(self) -> None:
        """All processes that it has started by now: a fork server, a scorer, two workers."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._pidfds[child.pid] = liveness.open_pid(child.pid)
        assert len(self._pidfds) == 4

    @property
    def living(self) -> int:
        """How many of them still run."""
        return sum(map(liveness.alive, self._pidfds.values()))

    def assert_nothing_left(self, within_s: float) -> None:
        """No process, no file in the places for passing ones, no roster."""
        assert self._pidfds
        assert liveness.wait_gone(self._pidfds.values(), within_s)
        assert list((self.folder / "tmp").iterdir()) == []
        pids = {self.process.pid, *self._pidfds}
        assert [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)] == []
        assert not self.out.exists() or not {"workers.json", "progress.jsonl"} & set(os.listdir(self.out))
        assert list(self.out.parent.glob(".*")) == []

    def ended(self) -> tuple[int, Any, str]:
        """Exit code, what it printed as JSON, and its stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, json.loads(out) if out else None, err


@contextlib.contextmanager
def command(folder: Path, *words: str) -> Iterator[Command]:
    """One that does not outlive the test."""
    it = Command(folder, *words)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()
        for pidfd in it._pidfds.values():
            liveness.kill(pidfd)
            os.close(pidfd)
