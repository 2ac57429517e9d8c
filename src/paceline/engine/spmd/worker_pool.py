"""Ranks of this host that compute answers together: every rank receives each request, and sends its own answer.

::

    main    work ------>                              request ------>             request ------>
    ranks          rendezvous, work.begin(): Answering         <------ answers            <------ answers
"""

import contextlib
import gc
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm.fork_server import ForkServer
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_pickle import ObjectReceiver, ObjectSender, SharedObject, unpack
from paceline.core.errors import PacelineError, kind_and_text
from paceline.core.types import Seconds
from paceline.engine.process_supervisor import REASON_S, RankProcesses, raised_by_rank
from paceline.engine.spmd.process_group import BACKEND, LaunchEnv, file_rendezvous
from paceline.engine.spmd.rank_context import RankContext, open_rank_context

PRELOAD = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.export._trace", __name__)
"""Modules that the fork server imports so that no rank has to."""

LONGEST_S: Seconds = 3600.0
"""Longest wait for all answers: longer than the ranks' own timeouts."""

Answering: TypeAlias = Callable[[Any], Any]
"""Computes this rank's answer to a request; all ranks get the same request, and call it together."""


class PoolWork(Protocol):
    """The work of a pool; it can be pickled."""

    @property
    def timeout_s(self) -> Seconds:
        """Bound on every wait of one rank for another."""

    def begin(self, context: RankContext) -> Answering:
        """Prepare on each rank, after the rendezvous."""


class WorkerPool:
    """Main's side of the pool; a context manager that ends the ranks.

    Args:
        work: what the ranks do.
        size: number of ranks.
        threads: of each rank.
        fork_server: spawns them.
    """

    def __init__(self, work: PoolWork, size: int, threads: int, fork_server: ForkServer) -> None:
        self._ranks = RankProcesses(fork_server, f"{__name__}:main", size, work, {"threads": threads})
        self._sender = ObjectSender()
        self._receivers = [ObjectReceiver(link) for link in self._ranks.links]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()
        self._sender.close()
        for receiver in self._receivers:
            receiver.close()

    def ask(self, request: object) -> Sequence[Any]:
        """Send a request to all ranks and return their answers, by rank.

        Raises:
            PacelineError: the first that a rank has sent, or a rank has ended; the pool can't be used any more.
        """
        answers: dict[int, Any] = {}
        ranks = self._ranks
        ranks.deadline = time.monotonic() + LONGEST_S
        if not all(self._sender.post(request, ranks.links)):
            ranks.limit(REASON_S)  # a rank has ended; what it sent before is read below
        while len(answers) < len(ranks.links) and not ranks.expired:
            for kind, rank in ranks.poll():
                if kind == "ended":
                    if rank not in answers:
                        ranks.limit(REASON_S)
                    continue
                try:
                    message = self._receivers[rank].collect()
                except (EOFError, ConnectionResetError):
                    ranks.hang_up(rank)
                    continue
                match message:
                    case "failed", error_class, text:
                        raise raised_by_rank(error_class, text)
                    case "done", answer:
                        answers[rank] = answer
        if len(answers) < len(ranks.links):
            raise ranks.silent_exit()
        return [answers[rank] for rank in range(len(ranks.links))]


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Entry of a rank's process.

    Args:
        args: ``rank``, ``size``, ``threads``, and ``store``, the path of the rendezvous file.
        fds: the work, and a socket for requests and answers.
    """
    keep_freed_memory()
    work_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            work: PoolWork = unpack(SharedObject(work_fd))
            torch.set_num_threads(args["threads"])
            file_rendezvous(args["rank"], args["size"], args["store"], work.timeout_s)
            try:
                with open_rank_context(LaunchEnv.found(), BACKEND, "cpu", work.timeout_s, watched=True) as context:
                    _serve(work.begin(context), link)
            finally:
                gc.collect()  # a group that is freed in the middle of another backward pass hangs (torch 2.13, Gloo)
        except BaseException as error:
            with contextlib.suppress(PacelineError):  # there is no memory left for the message
                ObjectSender().post(("failed", *kind_and_text(args["rank"], error)), [link])
            raise SystemExit(1) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _serve(answering: Answering, link: socket.socket) -> None:
    """Answer requests until main closes its end of the socket."""
    receiver, sender = ObjectReceiver(link), ObjectSender()
    while True:
        try:
            request = receiver.collect()
        except (EOFError, ConnectionResetError):
            return
        sender.post(("done", answering(request)), [link])
