"""A process that cleans up after its parent, however that ends; it imports next to nothing, to start at once.

Its standard input names, a line each, folders and files to remove when that input ends; a file's folder too, if it is
empty then. Where the last line is not :data:`FAREWELL`, the parent was killed: then processes of such a folder, of a
Ray that was started there, are killed first.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

# The last line of a parent that ends normally.
FAREWELL = "."

# Most looks for processes of a folder, 50 ms apart: 10 s.
TRIES = 200


def uses(process: str, folder: str) -> bool:
    """Return whether a process, as its folder in /proc, belongs to a folder: by its command line or an open file.

    Both are needed, since Ray's agents change their command line. A process that has ended does not.
    """
    try:
        with open(f"{process}/cmdline", "rb") as file:
            if folder.encode() in file.read():
                return True
        return any(os.readlink(f"{process}/fd/{fd}").startswith(folder) for fd in os.listdir(f"{process}/fd"))
    except OSError:
        return False


def clear(path: str, *, orphaned: bool) -> None:
    """Remove a path; where the parent was killed, kill the processes of a folder first."""
    for _ in range(TRIES if orphaned and os.path.isdir(path) else 0):
        others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        pids = [int(name) for name in others if uses(f"/proc/{name}", path)]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    for remove, target in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        with contextlib.suppress(OSError):  # it is gone, or a folder that is not empty
            remove(target)


def main() -> None:
    """Wait for the end of the input, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().splitlines()
    for path in lines:
        if path != FAREWELL:
            clear(path, orphaned=lines[-1] != FAREWELL)


if __name__ == "__main__":
    main()
