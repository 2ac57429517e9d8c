"""A process that clears up after its parent, however that ends; it imports next to nothing, to start at once.

Its standard input names, a line each, folders and files to be removed when that input ends; a file's folder too, if
nothing else is in it. Where the last line is no farewell, the parent was killed: then processes of such a folder, a Ray
that was started there, are ended first.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

FAREWELL = "."
"""The last line of a parent that ends in order."""

TRIES = 200
"""How often it looks whether a folder is free of processes, 50 ms apart: 10 s."""


def users(folder: str) -> list[int]:
    """The processes that were started for a folder: their command line names it, or they have files of it open."""
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [int(name) for name in others if uses(f"/proc/{name}", folder)]


def uses(process: str, folder: str) -> bool:
    """Whether a process belongs to a folder; one that has ended does not. Ray's agents change their command line."""
    try:
        with open(f"{process}/cmdline", "rb") as file:
            if folder.encode() in file.read():
                return True
        return any(os.readlink(f"{process}/fd/{fd}").startswith(folder) for fd in os.listdir(f"{process}/fd"))
    except OSError:
        return False


def clear(path: str, *, orphaned: bool) -> None:
    """Remove it; where the parent has not ended Ray by itself, end whoever uses it."""
    for _ in range(TRIES if orphaned and os.path.isdir(path) else 0):
        pids = users(path)
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        with contextlib.suppress(OSError):  # gone, or a folder that holds something else
            remove(what)


def main() -> None:
    """Wait for the end of the input, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    for path in lines:
        if path != FAREWELL:
            clear(path, orphaned=lines[-1] != FAREWELL)


if __name__ == "__main__":
    main()
