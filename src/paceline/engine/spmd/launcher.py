"""Run an SPMD engine on ranks that main spawns on this host, as if torchrun had started them; main trains nothing.

::

    main    spawn p ranks ... progress of rank 0 ........................................ outcome of rank 0
    rank 0  rendezvous | train: messages between ranks, none with main | evaluate | send the outcome
    rank 1  rendezvous | train                                         | evaluate |
"""

import contextlib
import functools
import pickle
import signal
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from paceline.comm import liveness
from paceline.comm.fork_server import MESSAGE_BYTES, ForkServer
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import SharedObject, share, unpack
from paceline.comm.wakeup import EventFd
from paceline.core.errors import PacelineError, kind_and_text
from paceline.core.types import Seconds
from paceline.engine import ENGINES
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.loop import InterruptGuard
from paceline.engine.process_supervisor import REASON_S, RankProcesses, raised_by_rank
from paceline.engine.spmd.process_group import BACKEND, file_rendezvous
from paceline.engine.worker_metrics import remove_workers_file

TICK_S: Seconds = 1.0
"""How often main looks for Ctrl-C and the deadline if nothing happens."""

END_S: Seconds = 1.0
"""Longest wait for the ranks to end by themselves after one has sent its failure."""


def preload(engine: str) -> tuple[str, ...]:
    """Return the modules that a fork server imports so that no rank of this engine has to."""
    # torch.export imports its _trace at the first call: 0.4 s in torch 2.13.
    heavy = ("torch", "torch._dynamo", "torch.distributed.tensor", "torch.export._trace")
    return (*heavy, ENGINES.modules[engine], __name__)


class SpmdLauncher:
    """The main process of one run.

    Args:
        job: what the ranks run, one rank for each worker of its strategy.
        engine: name of the engine in each rank; it must take the name of a backend.
        fork_server: spawns the ranks.
        watch: receives the progress of rank 0.
    """

    def __init__(self, job: Job, engine: str, fork_server: ForkServer, watch: Watcher) -> None:
        self._job, self._engine, self._fork_server, self._watch = job, engine, fork_server, watch
        self._training = False
        self._error: PacelineError | None = None
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome:
        """Run to the end.

        Raises:
            PacelineError: the first that a rank has sent; or a rank ended without a message.
        """
        self._watch(Progress("starting", 0.0))
        with contextlib.ExitStack() as closing:
            if self._job.out is not None:
                closing.callback(remove_workers_file, self._job.out)
            interrupt = closing.enter_context(contextlib.closing(EventFd()))
            interrupts = closing.enter_context(InterruptGuard(interrupt.set))
            size, args = self._job.strategy.workers, {"engine": self._engine}
            ranks = RankProcesses(self._fork_server, f"{__name__}:rank_main", size, self._job, args)
            closing.callback(ranks.close)
            ranks.supervisor.poller.add(interrupt.fileno(), ("interrupt", 0))
            forwarded = 0
            while ranks.supervisor.running and not ranks.expired:
                for kind, rank in ranks.poll(TICK_S):
                    if kind == "interrupt":
                        interrupt.clear()
                    elif kind == "message":
                        self._receive(ranks, rank)
                    elif not ranks.ended_well(rank):
                        ranks.limit(REASON_S)
                # Before training, SIGINT would end a rank instead of the run: it installs its handler with the engine.
                if self._training and interrupts.count > forwarded:
                    forwarded = interrupts.count
                    ranks.supervisor.signal(ranks.supervisor.running, signal.SIGINT)
            if self._error is not None:
                raise self._error
            if self._outcome is None:
                raise ranks.silent_exit()
            return self._outcome

    def _receive(self, ranks: RankProcesses, rank: int) -> None:
        message, fds, _, _ = socket.recv_fds(ranks.links[rank], MESSAGE_BYTES, 1)
        if not message:
            ranks.hang_up(rank)
            return
        match pickle.loads(message):
            case "progress", progress:
                self._training = True
                self._watch(progress)
            case "failed", kind, text:
                self._error = self._error or raised_by_rank(kind, text)
                ranks.limit(END_S)
            case ("done",):
                with contextlib.closing(SharedObject(fds[0])) as shared:
                    state, history, account, spans = unpack(shared)
                model = self._job.program.build()
                model.load_state_dict(state)
                self._outcome = Outcome(state, model, history, account, spans)


def rank_main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Entry of a rank's process.

    Args:
        args: ``rank``, ``size``, ``store``, the path of the rendezvous file, and ``engine``, the engine's name.
        fds: the job, and a socket to main, which carries pickled tuples.
    """
    keep_freed_memory()
    job_fd, link_fd = fds
    rank = args["rank"]
    with socket.socket(fileno=link_fd) as link:

        def watch(progress: Progress) -> None:
            if rank == 0:
                link.send(pickle.dumps(("progress", progress)))

        try:
            job: Job = unpack(SharedObject(job_fd))
            if job.out is not None:
                liveness.when_orphaned(functools.partial(remove_workers_file, job.out))
            file_rendezvous(rank, args["size"], args["store"], job.timeout_s)
            try:
                with ENGINES.entry(args["engine"]).cls(BACKEND) as engine:
                    outcome: Outcome = engine.run(job, watch)
            finally:
                dist.destroy_process_group()
            if rank == 0:
                result = (dict(outcome.state), list(outcome.history), outcome.account, list(outcome.spans))
                socket.send_fds(link, [pickle.dumps(("done",))], [share(result, SpillAllocator()).fd])
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has ended, or has closed its end
                link.send(pickle.dumps(("failed", *kind_and_text(rank, error))))
            raise SystemExit(1) from error
