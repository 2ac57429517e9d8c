"""What the servers and the workers of a run on Ray have of this host's cores while it trains (Linux).

::

    workers.json appears                                      the budget in seconds is spent
    |-------------------------------- the run trains --------------------------------|
    first snapshot                                                     second snapshot

A thread is busy while it runs on a core, and while it is ready and waits for one. Where the busiest thread of a server
is busy nearly all the time, replicas queue for that server.
"""

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from paceline.core.types import Nanoseconds, Seconds

POLL_S: Seconds = 0.02
"""Period at which the start of training is looked for; the start-up takes seconds."""

JOIN_S: Seconds = 10.0

FIGURES = (
    *("server_cores", "replica_cores", "rest_cores", "other_cores", "server_running", "server_ready"),
    *("load", "cores"),
)
"""What a :class:`Meter` measures: :func:`usage`, the load average of the minute before the run, the host's cores."""

Thread = tuple[str, int]
"""(role of its process, thread number)."""


@dataclass(frozen=True)
class Snapshot:
    """Times since each process, and the host, began."""

    at_s: Seconds
    running: Mapping[Thread, Nanoseconds]
    """Of the servers' threads, on a core."""
    ready: Mapping[Thread, Nanoseconds]
    """Of the same threads, waiting for a core."""
    replicas_s: Seconds
    """Processor time of all replicas."""
    rest_s: Seconds
    """Processor time of the run's evaluator and main process."""
    host_s: Seconds
    """Processor time of all programs of the host."""


def usage(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return what was used from one snapshot to the next.

    Returns:
        ``server_cores``, ``replica_cores``, ``rest_cores``: the run's processes; ``other_cores``: all other programs,
        Ray's own processes among them. ``server_running`` and ``server_ready``: fractions of the time in which the
        busiest thread of a server ran, or was ready and waited for a core.
    """
    passed_s = after.at_s - before.at_s
    running = {thread: (ns - before.running.get(thread, 0)) * 1e-9 for thread, ns in after.running.items()}
    ready = {thread: (ns - before.ready.get(thread, 0)) * 1e-9 for thread, ns in after.ready.items()}
    busiest = max(running, key=lambda thread: running[thread] + ready[thread])
    servers_s = sum(running.values())
    replicas_s, rest_s = after.replicas_s - before.replicas_s, after.rest_s - before.rest_s
    other_s = after.host_s - before.host_s - servers_s - replicas_s - rest_s
    taken = {
        "server_cores": servers_s,
        "replica_cores": replicas_s,
        "rest_cores": rest_s,
        "other_cores": max(0.0, other_s),  # the host's times are in ticks of 10 ms
        "server_running": running[busiest],
        "server_ready": ready[busiest],
    }
    return {name: seconds / passed_s for name, seconds in taken.items()}


class Meter:
    """Measures one run, around which it is a context manager.

    Args:
        seconds: the run's budget.
    """

    def __init__(self, seconds: Seconds) -> None:
        self._seconds, self._closing, self._ended = seconds, ExitStack(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.usage: dict[str, float] = {}
        """By :data:`FIGURES`; empty until the run has ended."""

    def __enter__(self) -> "Meter":
        self.out = Path(self._closing.enter_context(tempfile.TemporaryDirectory())) / "run"
        """For the run to be saved in: Paceline keeps there, while it lasts, who its processes are."""
        self._load = os.getloadavg()[0]
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)
        self._closing.close()

    def _watch(self) -> None:
        path = self.out / "workers.json"
        while not path.exists():
            if self._ended.wait(POLL_S):
                return
        processes = json.loads(path.read_text(encoding="utf-8"))
        with suppress(OSError, psutil.Error):  # a process has ended: the run has failed
            before = snapshot(processes)
            self._ended.wait(self._seconds)
            self.usage = usage(before, snapshot(processes))
            self.usage |= {"load": self._load, "cores": len(os.sched_getaffinity(0))}


def snapshot(processes: Iterable[Mapping[str, Any]]) -> Snapshot:
    """Return the times of these processes, as ``workers.json`` lists them, until now."""
    running: dict[Thread, Nanoseconds] = {}
    ready: dict[Thread, Nanoseconds] = {}
    replicas_s = rest_s = 0.0
    for process in processes:
        role, pid = process["role"], process["pid"]
        if role == "replica":
            replicas_s += _processor_s(pid)
        elif role == "coordinator" or role.startswith("server"):
            for folder in Path(f"/proc/{pid}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # threads come and go
                    words = (folder / "schedstat").read_text().split()
                    running[role, int(folder.name)], ready[role, int(folder.name)] = int(words[0]), int(words[1])
        else:
            rest_s += _processor_s(pid)
    host = psutil.cpu_times()
    host_s = host.user + host.nice + host.system + host.irq + host.softirq
    return Snapshot(time.perf_counter(), running, ready, replicas_s, rest_s, host_s)


def _processor_s(pid: int) -> Seconds:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
