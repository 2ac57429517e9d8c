"""What the forked children of these tests do, and the pipes by which they tell.

Children import it through the path that main hands over; without torch, so that they start at once.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from paceline.comm.wakeup import EventFd

Args = dict[str, Any]
BOUND_S = 60.0


class Pipe:
    """What children say, line by line."""

    def __init__(self) -> None:
        self.end, self.fd = os.pipe()
        self._rest = b""

    def read(self) -> Any:
        """The next JSON line; fails where none comes."""
        while b"\n" not in self._rest:
            assert select.select([self.end], [], [], BOUND_S)[0], "nothing was said"
            self._rest += os.read(self.end, 1 << 16)
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def ends(self, timeout_s: float) -> bool:
        """Whether, in that time, the last process that could write into it has gone."""
        while select.select([self.end], [], [], timeout_s)[0]:
            if not os.read(self.end, 1 << 16):
                return True
        return False


def reply(fd: int, content: object) -> None:
    """One JSON line into a pipe."""
    os.write(fd, json.dumps(content).encode() + b"\n")


def modules(args: Args, fds: list[int]) -> None:
    """Says which of some modules this process has."""
    reply(fds[0], [name in sys.modules for name in args["names"]])


def nothing(args: Args, fds: list[int]) -> None:
    """Ends at once."""


def echo(args: Args, fds: list[int]) -> None:
    """Says what it was given."""
    reply(fds[0], args)


def speak(args: Args, fds: list[int]) -> None:
    """Prints what stays in a buffer until the end, and says that it did."""
    print(args["text"], end="")
    reply(fds[0], "spoken")


def fail(args: Args, fds: list[int]) -> None:
    """Ends as it is told: by an exception, an exit or a signal."""
    if "code" in args:
        sys.exit(args["code"])
    if "signal" in args:
        signal.raise_signal(args["signal"])
    os.close(2)  # the traceback is not this test run's
    raise RuntimeError("on purpose")


def hang(args: Args, fds: list[int]) -> None:
    """Runs until it is killed; says first that it runs."""
    if fds:
        reply(fds[0], os.getpid())
    signal.pause()


def hang_deaf(args: Args, fds: list[int]) -> None:
    """As ``hang``, but no other thread of it ever gets to run: the call keeps the interpreter's lock."""
    reply(fds[0], os.getpid())
    ctypes.PyDLL(None).pause()


def hang_with_helper(args: Args, fds: list[int]) -> None:
    """As ``hang``, with a process of its own, as DataLoader workers are."""
    helper = subprocess.Popen(["sleep", "1000"])
    reply(fds[0], helper.pid)
    signal.pause()


def inspect(args: Args, fds: list[int]) -> None:
    """Says what a child is like from inside."""
    links = {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(int(n))}
    reply(
        fds[0],
        {
            "sockets": [link for link in links.values() if link.startswith("socket:")],
            "epolls": [link for link in links.values() if "eventpoll" in link],
            "pidfds": sum("pidfd" in link for link in links.values()),
            "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "leads_group": os.getpgrp() == os.getpid(),
            "session_of_main": os.getsid(0) == os.getsid(args["main"]),
            "main_file": getattr(sys.modules["__main__"], "__file__", ""),
            "path": sys.path,
            "pythonpath": os.environ.get("PYTHONPATH"),
        },
    )


def answer_eventfd(args: Args, fds: list[int]) -> None:
    """Set the second eventfd once for each time that the first one is set."""
    asked, answered = EventFd(fds[0]), EventFd(fds[1])
    for _ in range(args["times"]):
        assert asked.wait(60)
        asked.clear()
        answered.set()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # the listing's own
        return False
    return True
