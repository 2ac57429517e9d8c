"""Processes on demand, forked from a helper that has imported everything already.

    main ---- Popen ----> fork server ---- fork ----> child, child, ...
      \\___ requests, pidfds ___/                        |
       \\________________ watched by pidfd _____________/

The fork server (``fork_server_main.py``) is single-threaded and never imports ``__main__``, so main may be a script
without a guard, a notebook, a thread of a server or ``python -c``. Children end when main does, by whatever death, and
not when the fork server does. A Ctrl-C at the terminal reaches main alone.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm import liveness
from paceline.core.errors import InputError, PacelineError

# Size of a receiver's buffer: larger than any message that a socket takes.
MESSAGE_BYTES = 1 << 20

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """A forked process. ``pidfd`` belongs to its fork server, and is open until that closes or forgets the process."""

    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class ImportReport:
    """How imports went.

    Args:
        failed: module -> its error.
        threads: those that do not end before a fork: children may then wait for ever for what one of them has locked.
    """

    failed: Mapping[str, str]
    threads: int


class ForkServer:
    """A fork server and the processes that it has forked.

    ``start`` returns at once; the first ``spawn`` waits until the imports are done. Closing kills what still runs, and
    happens by itself when this object is no longer referenced and when main exits.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", link: socket.socket) -> None:
        self._process, self._link, self.pid = process, link, process.pid
        self._children: dict[int, ProcessHandle] = {}
        self._lock = threading.Lock()
        self._requests, self._ready = 0, False
        self._importing: int | None = None
        self._import_answer: dict[str, Any] | None = None
        """The answer to it, where it came before the one to a later request."""
        self.close = weakref.finalize(self, _close, os.getpid(), process, link, self._children)
        """Kill the children that still run, end the fork server, and wait until all have ended; idempotent."""

    @classmethod
    def start(cls, preload: Sequence[str] = ("torch",)) -> "ForkServer":
        """Start a fork server in the background.

        Args:
            preload: modules it imports before the first fork, so that no child has to.

        Raises:
            PacelineError: this system has no pidfds.
        """
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        main = liveness.open_pid(os.getpid())
        with remote:
            try:
                # Its own session: no Ctrl-C of a terminal. -P: main's path has the folder it was started in, if wanted.
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "paceline.comm.fork_server_main", str(remote.fileno()), str(main)],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(_import_path())},
                    pass_fds=(remote.fileno(), main),
                    start_new_session=True,
                )
            finally:
                os.close(main)
        fork_server = cls(process, local)
        first = {"path": _import_path(), "preload": list(preload), "pythonpath": os.environ.get("PYTHONPATH")}
        with contextlib.suppress(BrokenPipeError):  # wait_ready reports that it has ended, and how
            local.send(json.dumps(first).encode())
        return fork_server

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def importing(self) -> bool:
        """Whether nobody has waited yet for all that it was asked to import."""
        return self._importing is not None or not self._ready

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the fork server has imported what it should.

        Raises:
            PacelineError: it failed, with its traceback; or was not ready in time.
        """
        with self._lock:
            if not self._ready:
                self._expect(0, timeout_s)
                self._ready = True

    def begin_import(self, modules: Sequence[str]) -> None:
        """Have more modules imported; return at once.

        Args:
            modules: full names. What fails or starts threads is reported by :meth:`imported`.
        """
        with self._lock, contextlib.suppress(OSError):  # imported() reports that it has ended
            self._requests += 1
            self._importing, self._import_answer = self._requests, None
            request = {"id": self._requests, "do": "import", "modules": list(modules)}
            self._link.send(json.dumps(request).encode())

    def imported(self, timeout_s: float = START_TIMEOUT_S) -> "ImportReport | None":
        """Wait until the modules are imported and report on it; None: there was nothing to import.

        Raises:
            PacelineError: the fork server has ended by that, or was not done in time.
        """
        self.wait_ready(timeout_s)
        if self._importing is None:
            return None
        with self._lock:
            answer = self._import_answer or self._expect(self._importing, timeout_s)[0]
            self._importing = None
        return ImportReport(answer["failed"], answer["threads"])

    def spawn(self, entry: str, args: Mapping[str, Any], fds: Sequence[int] = ()) -> ProcessHandle:
        """Fork a child that calls ``entry(args, fds)`` and ends with it: exit code 0, or 1 and a traceback on stderr.

        It leaves by ``os._exit``: stdout and stderr are flushed, atexit handlers are not run.

        Args:
            entry: "package.module:function".
            args: JSON values, some 100 kB at most; share() larger objects and pass the fd.
            fds: file descriptors the child gets copies of, at most 253; main's own stay open.

        Raises:
            InputError: args or fds are too large or no JSON.
            PacelineError: the fork server has ended.
        """
        self.wait_ready()
        answer, received = self._request(
            {"do": "spawn", "entry": entry, "args": dict(args), "path": _import_path()}, fds
        )
        if not received:
            raise PacelineError(
                "main has too many open files for one more child; write fewer replicas= or ulimit -n 4096"
            )
        child = ProcessHandle(answer["pid"], received[0])
        previous = self._children.pop(child.pid, None)  # a pid is used again where its process has been reaped
        if previous is not None:
            os.close(previous.pidfd)
        self._children[child.pid] = child
        return child

    def status(self, pid: int) -> str | None:
        """Return how a child ended, as "exit code 0", "killed by SIGKILL"; None while it runs."""
        if liveness.alive(self._children[pid].pidfd):
            return None
        try:
            return liveness.describe_exit(self._request({"do": "status", "pid": pid}, ())[0]["code"])
        except PacelineError:
            return "ended, its status lost with the fork server"

    def forget(self, child: ProcessHandle) -> None:
        """Kill a child if it still runs, wait until it has ended, and close its pidfd; idempotent."""
        if self._children.get(child.pid) is child:
            liveness.kill(child.pidfd)
            liveness.wait_gone([child.pidfd], CLOSE_TIMEOUT_S)
            del self._children[child.pid]
            os.close(child.pidfd)

    def _request(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._requests += 1
            message = json.dumps(request | {"id": self._requests}).encode()
            try:
                socket.send_fds(self._link, [message], list(fds))
            except ConnectionError as error:
                raise self._gone(str(error)) from error
            except OSError as error:
                raise InputError(
                    f"a child's arguments of {len(message):,} bytes with {len(fds)} file descriptors can't be sent: "
                    f"{error}; share() what is large and pass its fd, and at most 253 of them"
                ) from error
            return self._expect(self._requests, ANSWER_TIMEOUT_S)

    def _expect(self, number: int, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        # The answer to an earlier request is left over if a Ctrl-C came between request and answer. Its child, if it
        # has one, is killed by the fork server when that is closed.
        self._link.settimeout(timeout_s)
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._link, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise self._gone(str(error) or "no answer") from error
            if not message:
                raise self._gone("it closed its socket")
            answer = json.loads(message)
            if answer["id"] == self._importing != number:
                self._import_answer = answer
            if answer["id"] == number:
                if "error" in answer:
                    raise PacelineError(f"the fork server failed:\n{answer['error']}")
                return answer, fds
            for fd in fds:
                os.close(fd)

    def _gone(self, reason: str) -> PacelineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reason = f"{reason}; {liveness.describe_exit(self._process.wait(timeout=1.0))}"
        return PacelineError(
            f"the fork server (pid {self.pid}) does not answer ({reason}); children that it had made live on, "
            "new ones need a new run"
        )


def _import_path() -> list[str]:
    """Return main's sys.path; "" in it means main's current folder."""
    return [entry or os.getcwd() for entry in sys.path]


def _close(
    owner: int, process: "subprocess.Popen[bytes]", link: socket.socket, children: dict[int, ProcessHandle]
) -> None:
    if os.getpid() != owner:  # a fork of main: these are not its children
        return
    pidfds = [child.pidfd for child in children.values()]
    for pidfd in pidfds:
        liveness.kill(pidfd)
    link.close()  # the fork server kills what it has, reaps it, and ends
    try:
        process.wait(timeout=CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    liveness.wait_gone(pidfds, CLOSE_TIMEOUT_S)
    for pidfd in pidfds:
        os.close(pidfd)
    children.clear()
