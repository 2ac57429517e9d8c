"""The process of a server that others join: it watches the run in this thread, and serves it in another one."""

import contextlib
import os
import socket
import time
from dataclasses import replace

from paceline.core.types import Seconds
from paceline.engine.base import Engine, Job, Outcome, Progress, Watcher
from paceline.engine.checkpointing import tell
from paceline.engine.loop import InterruptGuard
from paceline.engine.run_context import first_state, own_settings
from paceline.engine.server import messages
from paceline.engine.server.news import NewsReader
from paceline.engine.server.run_control import EventLoopThread
from paceline.engine.server.wire import CONNECT_S
from paceline.engine.serving.address import TOKEN, server_file, text_of
from paceline.engine.serving.host import ServingHost
from paceline.engine.worker_metrics import SERVER_NAME, training_spans, workers_file
from paceline.replica.flat_state import write
from paceline.support import Feature

# Addresses of all interfaces, by which nobody can connect.
_ALL = ("0.0.0.0", "::")


class ServingEngine(Engine):
    """Holds A, and has no replicas but those that join. Of a process that joins it checks the job.

    Args:
        address: host and port to listen at.
        token: that those who join must know.
        from_environment: whether the environment has the token.
    """

    name = "serving"
    features: frozenset[Feature] = frozenset({"asynchronous", "compression", "elastic", "on_death"})
    joins = True

    def __init__(
        self, address: tuple[str, int] = ("127.0.0.1", 0), token: str = "", *, from_environment: bool = False
    ) -> None:
        self._address, self._token, self._from_environment = address, token, from_environment

    def refuse(self, job: Job) -> None:
        """Do nothing: any machine can hold A."""

    def run(self, job: Job, watch: Watcher) -> Outcome:
        with own_settings(), InterruptGuard(lambda: None, watch.heard) as interrupts, contextlib.ExitStack() as closing:
            watch(Progress("starting", 0.0))
            thread = EventLoopThread("server of A")
            closing.callback(thread.close)
            host = thread.submit(self._opened(job)).result()
            closing.callback(lambda: thread.submit(host.close()).result())
            closing.enter_context(workers_file(job.out, {"server": _this_process()}, {}))
            self._tell(job, host, closing)
            return _Watched(job, thread, host, watch, interrupts).outcome()

    async def _opened(self, job: Job) -> ServingHost:
        return ServingHost(job, self._address, self._token)

    def _tell(self, job: Job, host: ServingHost, closing: contextlib.ExitStack) -> None:
        """Write down where the server listens, and say it."""
        name, port = host.address[:2]
        known = socket.gethostname() if name in _ALL else name
        closing.enter_context(server_file(job.out, known, port, self._token))
        where = f"the variable {TOKEN} of the environment" if self._from_environment else f"{job.out}/{SERVER_NAME}"
        tell(f"serving {job.program.name} at {text_of(name, port)}; the token that processes join with is in {where}")


def _this_process() -> dict[str, str | int]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


class _Watched:
    """The run, as this thread watches it.

    Args:
        job: what is run.
        thread: in which the server is.
        host: the server.
        watch: receives progress and events.
        interrupts: the first Ctrl-C ends training, the second one all waiting.
    """

    def __init__(
        self, job: Job, thread: EventLoopThread, host: ServingHost, watch: Watcher, interrupts: InterruptGuard
    ) -> None:
        self._job, self._thread, self._host, self._watch, self._interrupts = job, thread, host, watch, interrupts
        self._reader = NewsReader(job, watch)
        self._stopped: str | None = None

    def outcome(self) -> Outcome:
        """Return the outcome, once the run is over and those that have joined have A."""
        submit, host, reader = self._thread.submit, self._host, self._reader
        try:
            self._until_done()
        except BaseException as error:
            submit(host.break_off(error)).result()
            self._let_leave(CONNECT_S)
            raise
        self._let_leave(self._job.timeout_s)
        result = submit(host.result(self._interrupts.first, reader.known)).result()
        reader.take(result.news)
        module, state = first_state(self._job.program, self._job.running_buffers)
        model = write(module, messages.state_of(state.layout, result.state))
        account = replace(result.account, stopped=self._stopped)
        spans = training_spans(result.spans, result.began_ns) if self._job.trace else []
        return Outcome(model.state_dict(), model, result.history, account, spans)

    def _let_leave(self, timeout_s: Seconds) -> None:
        """Wait until no process is a replica any more, for the timeout, or a second Ctrl-C, at most."""
        deadline = time.monotonic() + timeout_s
        while not self._thread.submit(self._host.all_left()).result():
            if self._interrupts.insisted or time.monotonic() > deadline:
                return

    def _until_done(self) -> None:
        """Show progress and take events, until nothing is awaited any more."""
        interrupted = False
        while True:
            status = self._thread.submit(self._host.status(self._reader.known)).result()
            self._reader.take(status.news)
            self._watch(status.progress)
            if status.failure is not None:
                raise status.failure
            if status.phase == "done":
                return
            self._stopped = self._stopped or self._watch.stopped
            if (self._interrupts.count or self._stopped is not None) and not interrupted:
                interrupted = True
                self._thread.submit(self._host.run.interrupt()).result()
