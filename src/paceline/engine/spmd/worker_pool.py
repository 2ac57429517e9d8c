"""Processes of this host that meet, and answer together what they are asked, one question after the other.

::

    main    work ------>                              question ------>             question ------>
    ranks          meet, and begin the work: Answer            <------ answers               <------ answers

A process that answers together with others which somebody on this host has made.
"""

import contextlib
import gc
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm.fork_server import ForkServer, ProcessHandle
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_pickle import ObjectReceiver, ObjectSender, SharedObject, share, unpack
from paceline.comm.wakeup import Poller
from paceline.core import errors
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.remote_errors import kind_and_text
from paceline.engine.spmd.process_group import BACKEND, LaunchEnv, file_rendezvous
from paceline.engine.spmd.rank_context import RankContext, open_rank_context

ENTRY = "paceline.engine.spmd.worker_pool:main"

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.export._trace",
    "paceline.engine.spmd.worker_pool",
)
"""What the fork server imports, so that no member has to."""

LONGEST_S: Seconds = 3600.0
"""Until all have answered: more than they themselves allow each other."""

WORD_S: Seconds = 5.0
"""How long the others may take to say why, once one has ended without a word."""

Answering: TypeAlias = Callable[[Any], Any]
"""A question -> this rank's answer; all ranks are asked the same, and call it together."""


class Work(Protocol):
    """What a crew is made for; it can be pickled."""

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one member for another."""

    def begin(self, context: RankContext) -> Answering:
        """On each rank, once they have met."""


class WorkerPool:
    """The processes, from main's side; they end with the block that it is entered for.

    Args:
        work: what they are to do.
        size: how many they are.
        threads: of each.
        fork_server: makes them.
    """

    def __init__(self, work: Work, size: int, threads: int, fork_server: ForkServer) -> None:
        self._fork_server, self._size = fork_server, size
        self._waiter = Poller[tuple[str, int]]()
        self._found: dict[int, Any] = {}
        self._ended: dict[int, str] = {}
        self._deadline = 0.0
        self._links: list[socket.socket] = []
        self._outbox, self._inboxes = ObjectSender(), list[ObjectReceiver]()
        self._children: list[ProcessHandle] = []
        with ExitStack() as closing:
            folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
            closing.callback(self._close)
            self._start(work, threads, str(Path(folder) / "store"))
            self._closing = closing.pop_all()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def ask(self, question: object) -> Sequence[Any]:
        """What each rank answers, by rank.

        Raises:
            PacelineError: what the first of them has raised, or that one has ended; the crew is then of no use.
        """
        self._found, self._deadline = {}, time.monotonic() + LONGEST_S
        if not all(self._outbox.post(question, self._links)):  # one has gone; what it said before is heard
            self._deadline = time.monotonic() + WORD_S
        while len(self._found) < self._size and time.monotonic() < self._deadline:
            tokens = self._waiter.wait(max(0.0, self._deadline - time.monotonic()))
            for what, rank in sorted(tokens, key=lambda token: token[0] == "ended"):
                if what == "ended":
                    self._gone(rank)
                else:
                    self._hear(rank)
        if len(self._found) < self._size:
            how = "; ".join(f"rank {rank} {self._ended.get(rank, 'hangs')}" for rank in range(self._size))
            raise WorkerError(f"a rank ended without a word: {how}")
        return [self._found[rank] for rank in range(self._size)]

    def _start(self, work: Work, threads: int, store: str) -> None:
        parcel = share(work)
        try:
            for rank in range(self._size):
                mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._links.append(mine)
                self._inboxes.append(ObjectReceiver(mine))
                with theirs:
                    args = {"rank": rank, "size": self._size, "threads": threads, "store": store}
                    self._children.append(self._fork_server.spawn(ENTRY, args, [parcel.fd, theirs.fileno()]))
                self._waiter.add(mine.fileno(), ("message", rank))
                self._waiter.add(self._children[-1].pidfd, ("ended", rank))
        finally:
            parcel.close()

    def _hear(self, rank: int) -> None:
        try:
            word = self._inboxes[rank].collect()
        except (EOFError, ConnectionResetError):
            self._waiter.remove(self._links[rank].fileno())
            return
        match word:
            case "failed", kind, text:
                error: PacelineError = getattr(errors, kind)(text)
                raise error
            case "done", answer:
                self._found[rank] = answer

    def _gone(self, rank: int) -> None:
        self._waiter.remove(self._children[rank].pidfd)
        self._ended[rank] = self._fork_server.status(self._children[rank].pid) or "hangs"
        if rank not in self._found:
            self._deadline = min(self._deadline, time.monotonic() + WORD_S)

    def _close(self) -> None:
        """End who still runs, and let go of everything."""
        for child in self._children:
            self._fork_server.forget(child)
        self._outbox.close()
        for inbox in self._inboxes:
            inbox.close()
        for link in self._links:
            link.close()
        self._waiter.close()


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry.

    Args:
        args: ``rank``, ``size``, ``threads``, and ``store``, the path of a file by which ranks meet.
        fds: the work, and a socket for questions and answers.
    """
    keep_freed_memory()
    work_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            work: Work = unpack(SharedObject(work_fd))
            torch.set_num_threads(args["threads"])
            file_rendezvous(args["rank"], args["size"], args["store"], work.timeout_s)
            _answer(work, link)
        except BaseException as error:
            with contextlib.suppress(PacelineError):  # there is no memory left to say it
                ObjectSender().post(("failed", *kind_and_text(args["rank"], error)), [link])
            raise SystemExit(1) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _answer(work: Work, link: socket.socket) -> None:
    """All that is asked, until nobody asks any more."""
    try:
        with open_rank_context(LaunchEnv.found(), BACKEND, "cpu", work.timeout_s, watched=True) as context:
            answering = work.begin(context)
            inbox, outbox = ObjectReceiver(link), ObjectSender()
            while True:
                try:
                    question = inbox.collect()
                except (EOFError, ConnectionResetError):
                    return
                outbox.post(("done", answering(question)), [link])
    finally:
        gc.collect()  # a group that is let go of in the middle of another backward pass hangs (torch 2.13, Gloo)
