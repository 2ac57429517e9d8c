"""Starts processes under test, disturbs them from outside, and waits for their end; nothing of them outlives it.

What is done to whom, and when on the monotonic clock, is in :data:`injections`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TRAINEE = Path(__file__).with_name("trainee.py")

# A trial that takes longer has failed.
BOUND_S = 120.0

TAG = "PACELINE_RELIABILITY"
"""Variable of the environment by which the processes of a trainee are known; they do not read it."""

shared_settings: dict[str, Any] = {"data": None}
"""Settings of every trainee that do not belong to a row."""

other_python = sys.executable
"""Interpreter of the environment that has torchft and Ray Train."""

injections: list[str] = []
"""The log of this process: time, what, to whom."""


def inject(what: int | str, target: int | str) -> float:
    """Send a signal to a process, or note another disturbance; return when, on the monotonic clock.

    Raises:
        ProcessLookupError: the process has ended.
    """
    at = time.monotonic()
    if isinstance(what, int):
        os.kill(int(target), what)
        what = signal.Signals(what).name
    injections.append(f"{at:.6f} {what} {target}")
    return at


class Begun(NamedTuple):
    """A step that a worker has begun."""

    time_s: float
    replica: int
    step: int
    pid: int


@dataclass
class Trainee:
    """One process under test, with its workers.

    Args:
        process: the main process of the run, or torchrun's.
        folder: of its log and its ``workers.json``.
    """

    process: "subprocess.Popen[str]"
    folder: Path
    read: int = field(default=0, init=False)
    """Bytes of the log that were read."""

    def workers(self, role: str = "replica") -> list[dict[str, Any]]:
        """Return the processes of a role, as ``workers.json`` has them; none before training."""
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads((self.folder / "run" / "workers.json").read_text())
            return [row for row in rows if row["role"] == role]
        return []

    def begun(self) -> list[Begun]:
        """Return the steps that were begun since the last call."""
        with contextlib.suppress(OSError), (self.folder / "log").open() as file:
            file.seek(self.read)
            lines = file.read()
            whole = lines[: lines.rfind("\n") + 1]
            self.read += len(whole)
            return [_begun(line) for line in whole.splitlines()]
        return []

    def all_begun(self) -> list[Begun]:
        """Return all steps that were begun."""
        self.read = 0
        return self.begun()

    def wait_for(self, condition: Callable[[Begun], bool], bound_s: float = BOUND_S) -> Begun | None:
        """Wait for a step that fulfils a condition; None: the run has ended, or the time is up."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            running = self.process.poll() is None
            for each in self.begun():
                if condition(each):
                    return each
            if not running:
                return None
            time.sleep(0.002)
        return None

    def wait_for_step(self, replica: int | None = None, after_s: float = 0.0) -> float | None:
        """Wait until a replica, or any, has begun a step after a time; return that time, or None at the end."""
        found = self.wait_for(lambda each: each.time_s > after_s and replica in (None, each.replica))
        return None if found is None else found.time_s

    def remarks(self) -> list[tuple[float, str, int]]:
        """Return when main has named which replica as what."""
        with contextlib.suppress(FileNotFoundError):
            lines = [line.split() for line in (self.folder / "remarks").read_text().splitlines()]
            return [(float(time_s), kind, int(replica)) for time_s, kind, replica in lines]
        return []

    def stderr(self) -> str:
        """Return what was written to stderr so far."""
        return (self.folder / "stderr").read_text(errors="replace")

    def ends(self, bound_s: float = BOUND_S) -> float | None:
        """Wait for the end of the main process; return how long it took, or None if it was too long."""
        began = time.monotonic()
        try:
            self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - began

    def all_printed(self) -> list[dict[str, Any]]:
        """Return the JSON lines on stdout of a run that has ended, one of each rank."""
        lines = (self.folder / "stdout").read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line[:1] == "{"]

    def printed(self) -> dict[str, Any] | None:
        """Return the last JSON line on stdout of a run that has ended; None: there is none."""
        return next(reversed(self.all_printed()), None)

    def result(self, bound_s: float = BOUND_S) -> dict[str, Any] | None:
        """Wait for the end; return what it printed, or None if it has not ended well."""
        return self.printed() if self.ends(bound_s) is not None and self.process.returncode == 0 else None


def _begun(line: str) -> Begun:
    time_s, replica, step, pid = line.split()
    return Begun(float(time_s), int(replica), int(step), int(pid))


@contextlib.contextmanager
def trainee(
    *, script: Path = TRAINEE, launcher: Sequence[str] = (sys.executable,), **settings: Any
) -> Iterator[Trainee]:
    """Context manager: start a trainee with these arguments of ``train``; kill what is left of it afterwards.

    Args:
        script: what is started; gets the settings as one JSON object.
        launcher: words before it, those of torchrun, say.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        folder = Path(name)
        given = {"log": str(folder / "log"), "out": str(folder / "run"), "folder": str(folder)}
        if "hold" in settings:
            settings["hold"] |= {"folder": name}
        words = json.dumps(shared_settings | given | settings)
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            process = subprocess.Popen(
                [*launcher, str(script), words],
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env=os.environ | {TAG: name},
            )
        try:
            yield Trainee(process, folder)
        finally:
            for pid in living(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def living(tag: str) -> list[int]:
    """Return the processes that were started by a trainee of this folder, by whomever, and have not ended."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # a zombie's is empty, and one that has gone can't be read
            if f"{TAG}={tag}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def torchrun(ranks: int, *words: str) -> list[str]:
    """Return the words that start so many ranks on this host."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *words,
    ]  # fmt: skip


def undisturbed(*, bound_s: float = BOUND_S, **settings: Any) -> dict[str, Any]:
    """Return the result of a run that nothing happens to."""
    with trainee(**settings) as run:
        result = run.result(bound_s)
        if result is None:
            raise RuntimeError(f"a run that nothing happened to failed: {settings}\n{run.stderr()[-2000:]}")
    return result


def until(condition: Callable[[], bool], bound_s: float = BOUND_S, pause_s: float = 0.005) -> bool:
    """Wait until something is true; return whether it has become so in time."""
    deadline = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
