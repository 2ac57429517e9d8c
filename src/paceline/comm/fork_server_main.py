"""The fork server's process: ``python -m paceline.comm.fork_server_main LINK MAIN``, started by ``ForkServer.start``.

One thread imports, then forks, answers and reaps until main has ended or closes its socket. Requests and answers are
JSON messages on the socket LINK; MAIN is main's pidfd::

    main -> {path, preload}                        server -> {id: 0}, or {id: 0, error}
    main -> {id, do: spawn, entry, args, path} + fds       -> {id, pid} + the child's pidfd
    main -> {id, do: status, pid}                          -> {id, code}
    main -> {id, do: import, modules}                      -> {id, failed, threads}

Main may ask for more imports, of modules that the user's program needs: one that fails does no harm, for a child that
needs it meets its error by itself. A fork has the forking thread alone, and what another one has locked stays locked in
it. Libraries that know of forks (OpenBLAS, which NumPy and SciPy start) end their threads before one; so one child is
forked for nothing, and the threads that are left after it are those that no child would be safe from.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from paceline.comm import liveness
from paceline.comm.fork_server import MESSAGE_BYTES
from paceline.comm.wakeup import Poller

MAX_FDS = 253  # the kernel's bound for one message
GRACE_S = 1.0
REAP_TIMEOUT_S = 1.0

# Longest wait for threads that have ended to be gone from the kernel's list.
THREADS_TIMEOUT_S = 0.5


class ForkServerLoop:
    """Serves requests; keeps the pidfds of its children, and the exit codes of those that have ended."""

    def __init__(self, link: socket.socket, main: int) -> None:
        self._link, self._main = link, main
        self._pidfds: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._poller = Poller[int]()  # tokens: pids of children, 0 for a request, -1 for the end of main
        self._poller.add(link.fileno(), 0)
        self._poller.add(main, -1)

    def serve(self) -> None:
        """Answer until main has ended; then end all children and reap them."""
        while True:
            tokens = self._poller.wait(None)
            for pid in tokens:
                if pid > 0:
                    self._reap(pid)
            if -1 in tokens or (0 in tokens and not self._answer()):
                return self._end()

    def _answer(self) -> bool:
        try:
            message, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            if message:
                request = json.loads(message)
                if request["do"] == "spawn":
                    self._spawn(request, fds)
                elif request["do"] == "import":
                    with _leaving_with_main(self._link, self._main):
                        _send(self._link, id=request["id"], **_imported(request["modules"]))
                else:
                    self._reap(request["pid"])
                    _send(self._link, id=request["id"], code=self._codes[request["pid"]])
            return bool(message)
        except ConnectionError:
            return False

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        _flush()  # or the child would write it a second time
        try:
            pid = os.fork()
            if pid == 0:
                self._become_child(request, fds)
        except OSError as error:
            _send(self._link, id=request["id"], error=f"fork: {error}")
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._codes.pop(pid, None)
        self._pidfds[pid] = liveness.open_pid(pid)  # race-free: no other process can reap it
        self._poller.add(self._pidfds[pid], pid)
        _send(self._link, self._pidfds[pid], id=request["id"], pid=pid)

    def _reap(self, pid: int) -> None:
        pidfd = self._pidfds.get(pid)
        if pidfd is None or liveness.alive(pidfd):
            return
        # Kill its own helpers too. While it is a zombie, no other process group can have its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._poller.remove(pidfd)
        os.close(self._pidfds.pop(pid))

    def _end(self) -> None:
        # Children notice the end of main by themselves, and may have to clean up (``liveness.last_acts``).
        liveness.wait_gone(self._pidfds.values(), GRACE_S)
        for pidfd in self._pidfds.values():
            liveness.kill(pidfd)
        liveness.wait_gone(self._pidfds.values(), REAP_TIMEOUT_S)
        for pid in list(self._pidfds):
            self._reap(pid)

    def _become_child(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        """Call the entry, and leave: by os._exit, for the fork server's atexit handlers are not this process's."""
        code = 1
        try:
            os.setpgid(0, 0)
            liveness.watch_and_exit(self._main)
            self._poller.close()
            self._link.close()
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            sys.path[:] = request["path"]
            module, _, name = request["entry"].partition(":")
            getattr(importlib.import_module(module), name)(request["args"], fds)
            code = 0
        except BaseException as error:
            if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
                code = error.code or 0
            else:
                traceback.print_exc()
        finally:
            try:
                _flush()
            finally:
                os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()


def _send(link: socket.socket, *fds: int, **content: Any) -> None:
    socket.send_fds(link, [json.dumps(content).encode()], fds)


@contextlib.contextmanager
def _leaving_with_main(link: socket.socket, main: int) -> Iterator[None]:
    """Context manager: exit when main does."""
    # During the imports no poll waits for main, and forks would inherit locks that a thread holds: so check on a timer.

    def look(*_: object) -> None:
        poll = select.poll()
        poll.register(main, select.POLLIN)
        poll.register(link, 0)  # its hang-up
        if poll.poll(0):
            os._exit(liveness.ORPHANED)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _prepare(link: socket.socket) -> None:
    """Import the modules that main names; report to it that they are ready, or the error."""
    request = json.loads(link.recv(MESSAGE_BYTES))
    sys.path[:] = request["path"]
    os.environ.pop("PYTHONPATH", None)
    if request["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = request["pythonpath"]
    try:
        with _importing():
            for module in request["preload"]:
                importlib.import_module(module)
    except BaseException:
        _send(link, id=0, error=traceback.format_exc())
        raise SystemExit(1) from None
    _send(link, id=0)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Context manager: no collections within, which take a fifth of the time; what was imported is never collected."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()  # collections in the children then write to none of these pages, which stay shared
        gc.enable()


def _imported(modules: Sequence[str]) -> dict[str, Any]:
    """Import modules; return the errors of those that fail, and how many threads a child would be unsafe from."""
    failed: dict[str, str] = {}
    with _importing():
        for module in modules:
            try:
                importlib.import_module(module)
            except BaseException as error:
                failed[module] = f"{type(error).__name__}: {error}"
    return {"failed": failed, "threads": _unsafe_threads()}


def _unsafe_threads() -> int:
    """Return the number of threads, besides this one, that do not end before a fork."""
    if threading.active_count() == 1 and _threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + THREADS_TIMEOUT_S
        while _threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    return _threads() - 1


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main(arguments: Sequence[str]) -> None:
    """Run the fork server; ``arguments`` are the two file descriptors."""
    # The signals of a fresh process, however main was started; but no Ctrl-C, which is main's.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link, main_pidfd = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    os.set_inheritable(link.fileno(), False)
    os.set_inheritable(main_pidfd, False)
    with _leaving_with_main(link, main_pidfd):
        _prepare(link)
    ForkServerLoop(link, main_pidfd).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
