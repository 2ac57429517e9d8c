"""A run whose replica is several processes of this host: main makes them, hears them, and ends them.

They are the ranks of a process group, as if torchrun had started them; main trains nothing itself::

    main    fork p ranks ... progress of rank 0 ............................ what came of it -> Outcome
    rank 0  meet | train: messages between ranks, none with main | score | tell
    rank 1  meet | train                                         | score |
"""

import math
import pickle
import signal
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.comm import liveness
from paceline.comm.fork_server import MESSAGE_BYTES, ForkServer, ProcessHandle
from paceline.comm.shared_pickle import SharedObject, share, unpack
from paceline.comm.wakeup import EventFd, Poller
from paceline.core import errors
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.sigint import Interruptible
from paceline.engine.workers_file import remove_workers_file

ENTRY = "paceline.engine.distributed.spmd_main:main"

WORD_S: Seconds = 5.0
"""How long the others may take to say why, once a rank has ended: they look for the dead many times a second."""

WELL = "exit code 0"
"""How a rank ends that has nothing to say."""

TICK_S: Seconds = 1.0
"""How often main looks around where nothing happens."""

END_S: Seconds = 1.0
"""How long they may take to end, once somebody has said it."""


class SpmdLauncher:
    """One run.

    Args:
        job: what is run.
        fork_server: makes its processes.
        watch: told how it stands.
        closing: what has to be let go of, however it ends; for the caller to close.
    """

    def __init__(self, job: Job, fork_server: ForkServer, watch: Watcher, closing: ExitStack) -> None:
        self._job, self._fork_server, self._watch, self._closing = job, fork_server, watch, closing
        self._bell, self._waiter = EventFd(), Poller[tuple[str, int]]()
        self._links: dict[int, socket.socket] = {}
        self._children: dict[int, ProcessHandle] = {}
        self._living: dict[int, ProcessHandle] = {}
        self._deadline = math.inf
        self._listens = False
        self._passed_on = 0
        self._error: PacelineError | None = None
        self._outcome: Outcome | None = None
        closing.callback(self._close)

    def outcome(self) -> Outcome:
        """Run to the end."""
        self._watch(Progress("starting", 0.0))
        with Interruptible(self._bell.ring) as ctrl_c:
            self._start()
            while self._living and time.monotonic() < self._deadline:
                self._take(self._waiter.wait(min(TICK_S, max(0.0, self._deadline - time.monotonic()))))
                self._pass_on(ctrl_c.heard)
        return self._result()

    def _no_longer_than(self, seconds: Seconds) -> None:
        """Wait for so long, at most, from now on."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _start(self) -> None:
        folder = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        parcel: SharedObject = share(self._job)
        self._closing.callback(parcel.close)
        self._waiter.add(self._bell.fileno(), ("bell", 0))
        size = self._job.strategy.workers
        for rank in range(size):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._links[rank] = mine
            with theirs:
                args = {"rank": rank, "size": size, "store": str(Path(folder) / "store")}
                child = self._fork_server.spawn(ENTRY, args, [parcel.fd, theirs.fileno()])
            self._children[rank] = self._living[rank] = child
            self._waiter.add(mine.fileno(), ("message", rank))
            self._waiter.add(child.pidfd, ("ended", rank))

    def _take(self, tokens: list[tuple[str, int]]) -> None:
        """What has happened: messages first, since who has ended may have left one."""
        for what, rank in sorted(tokens, key=lambda token: token[0] == "ended"):
            if what == "bell":
                self._bell.clear()
            elif what == "message":
                self._hear(rank)
            else:
                self._ended(rank)

    def _hear(self, rank: int) -> None:
        message, fds, _, _ = socket.recv_fds(self._links[rank], MESSAGE_BYTES, 1)
        if not message:
            self._waiter.remove(self._links[rank].fileno())
            return
        match pickle.loads(message):
            case "progress", progress:
                self._listens = True
                self._watch(progress)
            case "failed", kind, text:
                self._error = self._error or getattr(errors, kind)(text)
                self._no_longer_than(END_S)
            case ("done",):
                self._outcome = self._rebuilt(SharedObject(fds[0]))

    def _ended(self, rank: int) -> None:
        child = self._living.pop(rank)
        self._waiter.remove(child.pidfd)
        if self._fork_server.status(child.pid) != WELL:
            self._no_longer_than(WORD_S)

    def _pass_on(self, heard: int) -> None:
        """Tell the ranks of each Ctrl-C, once they listen."""
        if self._listens and heard > self._passed_on:
            self._passed_on = heard
            for child in self._living.values():
                liveness.kill(child.pidfd, signal.SIGINT)

    def _rebuilt(self, parcel: SharedObject) -> Outcome:
        state, history, account, spans = unpack(parcel)
        parcel.close()
        model = self._job.program.build()
        model.load_state_dict(state)
        return Outcome(state, model, history, account, spans)

    def _result(self) -> Outcome:
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            how = ((rank, self._fork_server.status(child.pid) or "hangs") for rank, child in self._children.items())
            raise WorkerError(f"a rank ended without a word: {'; '.join(f'rank {r} {what}' for r, what in how)}")
        return self._outcome

    def _close(self) -> None:
        """End who still runs, and let go of everything."""
        for child in self._children.values():
            self._fork_server.forget(child)
        for link in self._links.values():
            link.close()
        self._waiter.close()
        self._bell.close()
        if self._job.out is not None:
            remove_workers_file(self._job.out)
