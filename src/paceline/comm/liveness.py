"""Liveness of processes, by pidfd (Linux).

A pidfd stands for one process for ever, where a pid may soon be another's; it becomes readable when the process has
ended, also while that is still a zombie.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.comm import linux

# Fast functions that do not raise, called before watch_and_exit ends this process.
last_acts: list[Callable[[], None]] = []

# Exit code of a process that ended because the one it worked for had.
ORPHANED = 86


def open_pid(pid: int) -> int:
    """Return a pidfd, to be closed by ``os.close``; raise ProcessLookupError if there is no such process."""
    return linux.pidfd_open(pid)


def alive(pidfd: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    return not _ended([pidfd], 0)


def kill(pidfd: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; do nothing if the process has ended."""
    try:
        linux.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return


def wait_gone(pidfds: Iterable[int], timeout_s: float | None) -> bool:
    """Wait until all of these processes have ended; return False if the time is up first. None: no timeout."""
    left = set(pidfds)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while left:
        ended = _ended(left, None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ended:
            return False
        left -= ended
    return True


def watch_and_exit(pidfd: int) -> None:
    """End this process as soon as the one behind ``pidfd`` has ended, whatever it is doing then.

    A process that leads its own group kills the group, so that its own helpers (DataLoader workers) end too.
    """

    def watch() -> None:
        wait_gone([pidfd], None)
        for last_act in last_acts:
            with contextlib.suppress(Exception):
                last_act()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="paceline-watch", daemon=True).start()


def describe_exit(code: int) -> str:
    """Describe an exit code as of subprocess, negative for a signal, in words.

    >>> describe_exit(-9), describe_exit(3)
    ('killed by SIGKILL', 'exit code 3')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"


def how_ended(pidfd: int, pid: int) -> str:
    """Describe how a process that has ended did, this process's child or not; ``ended`` where the kernel does not say.

    Before its parent has waited for it, /proc says so; afterwards, from Linux 6.15 on, the pidfd does.
    """
    status: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may have spaces; the state is the third field, the status the 52nd.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        status = int(fields[49]) if fields[0] == "Z" else None
    if status is None:
        status = linux.pidfd_exit_status(pidfd)
    return "ended" if status is None else describe_exit(os.waitstatus_to_exitcode(status))


def _ended(pidfds: Iterable[int], timeout_s: float | None) -> set[int]:
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    return {pidfd for pidfd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
