"""Starts a trainee, disturbs it from outside, and waits for its end; nothing that it starts outlives it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAINEE = Path(__file__).with_name("trainee.py")

# A trial that takes longer has failed.
BOUND_S = 120.0


@dataclass
class Trainee:
    """One process under test, with its workers.

    Args:
        process: the main process of the run.
        folder: of its log and its ``workers.json``.
    """

    process: "subprocess.Popen[str]"
    folder: Path
    read: int = field(default=0, init=False)
    """Bytes of the log that were read."""

    def workers(self) -> list[dict[str, Any]]:
        """Return the replicas' processes, as ``workers.json`` has them; none before training."""
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads((self.folder / "run" / "workers.json").read_text())
            return [row for row in rows if row["role"] == "replica"]
        return []

    def steps(self) -> list[tuple[float, int]]:
        """Return the steps that were begun since the last call, as (monotonic time, replica)."""
        with contextlib.suppress(OSError), (self.folder / "log").open() as file:
            file.seek(self.read)
            lines = file.read()
            whole = lines[: lines.rfind("\n") + 1]
            self.read += len(whole)
            return [(float(time_s), int(replica)) for time_s, replica in map(str.split, whole.splitlines())]
        return []

    def wait_for_step(self, replica: int | None = None, after_s: float = 0.0) -> float | None:
        """Wait until a replica, or any, has begun a step after a time; return that time, or None at the end."""
        deadline = time.monotonic() + BOUND_S
        while self.process.poll() is None and time.monotonic() < deadline:
            for time_s, who in self.steps():
                if time_s > after_s and replica in (None, who):
                    return time_s
            time.sleep(0.002)
        return None

    def result(self) -> dict[str, Any] | None:
        """Wait for the end; return what it printed, or None if it has not ended well."""
        try:
            stdout, _ = self.process.communicate(timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            return None
        if self.process.returncode != 0:
            return None
        result: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return result


@contextlib.contextmanager
def trainee(**settings: Any) -> Iterator[Trainee]:
    """Context manager: start a trainee with these arguments of ``train``; kill what is left of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="paceline-reliability-") as name:
        folder = Path(name)
        words = json.dumps(settings | {"log": str(folder / "log"), "out": str(folder / "run")})
        process = subprocess.Popen(
            [sys.executable, str(TRAINEE), words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            yield Trainee(process, folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
