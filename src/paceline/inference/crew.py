"""Main's side: makes the processes that answer, hears them, and ends them."""

import pickle
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from paceline.comm.bell import Waiter
from paceline.comm.nursery import MESSAGE_BYTES, Child, Nursery
from paceline.comm.shipping import Parcel, ship, unpack
from paceline.core import errors
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds
from paceline.inference.question import Answer, Question

ENTRY = "paceline.inference.worker:main"

PRELOAD = ("torch", "torch._dynamo", "torch.distributed.tensor", "paceline.inference.worker")
"""What the fork server imports, so that no worker has to."""

LONGEST_S: Seconds = 3600.0
"""Until all have answered: more than they themselves allow each other."""

WORD_S: Seconds = 5.0
"""How long the others may take to say why, once one has ended without a word."""


def asked(question: Question, nursery: Nursery, threads: int) -> Sequence[Answer]:
    """What each worker has of the output, by rank.

    Raises:
        PacelineError: what the first of them has raised, or that one has ended; none is left then.
    """
    with ExitStack() as closing:
        return _Crew(question, nursery, threads, closing).answers()


class _Crew:
    def __init__(self, question: Question, nursery: Nursery, threads: int, closing: ExitStack) -> None:
        self._nursery, self._size = nursery, question.strategy.workers
        self._waiter = Waiter[tuple[str, int]]()
        self._found: dict[int, Answer] = {}
        self._ended: dict[int, str] = {}
        self._deadline = time.monotonic() + LONGEST_S
        self._links: list[socket.socket] = []
        self._children: list[Child] = []
        closing.callback(self._close)
        self._start(question, threads, closing)

    def answers(self) -> Sequence[Answer]:
        """Once all are there."""
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

    def _start(self, question: Question, threads: int, closing: ExitStack) -> None:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        parcel = ship(question)
        closing.callback(parcel.close)
        for rank in range(self._size):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._links.append(mine)
            with theirs:
                store = str(Path(folder) / "store")
                args = {"rank": rank, "size": self._size, "threads": threads, "store": store}
                self._children.append(self._nursery.spawn(ENTRY, args, [parcel.fd, theirs.fileno()]))
            self._waiter.add(mine.fileno(), ("message", rank))
            self._waiter.add(self._children[-1].pidfd, ("ended", rank))

    def _hear(self, rank: int) -> None:
        message, fds, _, _ = socket.recv_fds(self._links[rank], MESSAGE_BYTES, 1)
        if not message:
            self._waiter.remove(self._links[rank].fileno())
            return
        match pickle.loads(message):
            case "failed", kind, text:
                error: PacelineError = getattr(errors, kind)(text)
                raise error
            case ("done",):
                parcel = Parcel(fds[0])
                self._found[rank] = unpack(parcel)
                parcel.close()

    def _gone(self, rank: int) -> None:
        self._waiter.remove(self._children[rank].pidfd)
        self._ended[rank] = self._nursery.status(self._children[rank].pid) or "hangs"
        if rank not in self._found:
            self._deadline = min(self._deadline, time.monotonic() + WORD_S)

    def _close(self) -> None:
        """End who still runs, and let go of everything."""
        for child in self._children:
            self._nursery.forget(child)
        for link in self._links:
            link.close()
        self._waiter.close()
