"""Workers in processes of this host. Each maps the program's arrays from shared memory and keeps its rows of them.

A round is one message to all workers and one back from each. New values wait for the next message::

    main -> all     (new values of the last round or None, question, its arguments)
    worker -> main  ("done", answer) or ("failed", class of the error, text)
"""

import contextlib
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.comm import liveness
from paceline.comm.fork_server import START_TIMEOUT_S, ForkServer, ProcessHandle
from paceline.comm.shared_pickle import ObjectReceiver, ObjectSender, SharedObject, share, unpack
from paceline.core import errors
from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import Seconds
from paceline.parameter_scheduling.base import Array, Numbers, ScheduledProgram
from paceline.parameter_scheduling.workers import Worker, Workers

# How long a worker whose socket is closed may take to end, so that it can be said how.
END_S: Seconds = 5.0


class LocalWorkers(Workers):
    """Workers in processes of their own; closing ends them.

    Args:
        program: what they work on; anything that can be pickled.
        rows: of each worker.
        timeout_s: longest time that an answer may take.

    Raises:
        InputError: the program can't be sent to another process.
        WorkerError: a worker has ended, or failed, with its own traceback.
        WaitTimeoutError: a worker has not answered in time.
    """

    def __init__(self, program: ScheduledProgram[Any], rows: Sequence[Numbers], *, timeout_s: Seconds) -> None:
        super().__init__(rows)
        self._links: list[socket.socket] = []
        self._children: list[ProcessHandle] = []
        self._sender, self._receivers = ObjectSender(), list[ObjectReceiver]()
        self._after: Array | None = None
        with contextlib.closing(share((program, list(rows)))) as shared, contextlib.ExitStack() as undo:
            self._fork_server = ForkServer.start((__name__,))
            undo.callback(self.close)
            for worker in range(len(rows)):
                self._spawn(worker, shared)
            self._wait_s(START_TIMEOUT_S)
            self._ask("ready")
            self._wait_s(timeout_s)
            undo.pop_all()

    def close(self) -> None:
        self._fork_server.close()
        self._sender.close()
        for link, receiver in zip(self._links, self._receivers, strict=True):
            receiver.close()
            link.close()

    def pushed(self, chosen: Numbers, values: Array) -> Sequence[Array]:
        began_s = time.perf_counter()
        answers = self._ask("push", chosen, values)
        self.time_s += time.perf_counter() - began_s
        return answers

    def absorbed(self, after: Array) -> None:
        self._after = after

    def losses(self) -> Iterable[float]:
        return self._ask("loss")

    def kept(self) -> Iterable[Array | None]:
        return self._ask("row_values")

    def _wait_s(self, timeout_s: Seconds) -> None:
        self._timeout_s = timeout_s
        for link in self._links:
            link.settimeout(timeout_s)

    def _spawn(self, worker: int, shared: SharedObject) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._links.append(here)
        self._receivers.append(ObjectReceiver(here))
        with there:
            fds = (shared.fd, there.fileno())
            self._children.append(self._fork_server.spawn(f"{__name__}:work", {"worker": worker}, fds))

    def _ask(self, question: str, *arguments: Array | Numbers) -> list[Any]:
        self._sender.post((self._after, question, arguments), self._links)  # who has ended is found below
        self._after = None
        return [self._answer(worker) for worker in range(len(self._links))]

    def _answer(self, worker: int) -> Any:
        try:
            message = self._receivers[worker].collect()
        except TimeoutError:
            raise WaitTimeoutError(
                f"worker {worker} has not answered main within {self._timeout_s:g} s; write a larger timeout_s="
            ) from None
        except (EOFError, ConnectionResetError):
            child = self._children[worker]
            liveness.wait_gone([child.pidfd], END_S)
            how = self._fork_server.status(child.pid) or "it closed its socket"
            raise WorkerError(f"worker {worker} (pid {child.pid}) ended before the run did: {how}") from None
        match message:
            case "failed", kind, text:
                raise getattr(errors, kind)(text)
            case _, answer:
                return answer


def work(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Entry of a worker's process.

    Args:
        args: ``worker``, its number.
        fds: program and rows of all workers, and a socket for questions and answers.
    """
    shared_fd, link_fd = fds
    sender = ObjectSender()
    with socket.socket(fileno=link_fd) as link, np.errstate(over="ignore", invalid="ignore"):
        receiver = ObjectReceiver(link)
        try:
            program, rows = unpack(SharedObject(shared_fd), at_once=False)
            worker = Worker(program, rows[args["worker"]])
            while True:
                try:
                    after, question, arguments = receiver.collect()
                except (EOFError, ConnectionResetError):
                    return
                if after is not None:
                    worker.absorb(after)
                answer = None if question == "ready" else getattr(worker, question)(*arguments)
                sender.post(("done", answer), [link])
        except BaseException as error:
            with contextlib.suppress(PacelineError):  # there is no memory left for the message
                sender.post(("failed", *_told(args["worker"], error)), [link])
            raise SystemExit(1) from error


def _told(worker: int, error: BaseException) -> tuple[str, str]:
    if isinstance(error, PacelineError):
        return type(error).__name__, f"worker {worker}: {error}"
    summary = traceback.format_exception_only(error)[-1].strip()
    lines = "".join(traceback.format_exception(error))[-errors.LONGEST_TRACEBACK :]
    return WorkerError.__name__, f"worker {worker} failed: {summary}\n\n{lines}"
