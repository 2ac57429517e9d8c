"""Ranks that main spawns on this host, as if torchrun had started them: a run of an engine, or a pool that answers.

A run, of which main trains nothing::

    main    spawn p ranks ... progress of rank 0 ........................................ outcome of rank 0
    rank 0  rendezvous | train: messages between ranks, none with main | evaluate | send the outcome
    rank 1  rendezvous | train                                         | evaluate |

A pool, in which every rank receives each request, and sends its own answer::

    main    work ------>                              request ------>             request ------>
    ranks          rendezvous, work.begin(): Answering         <------ answers            <------ answers
"""

import contextlib
import functools
import gc
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm import liveness
from paceline.comm.fork_server import MESSAGE_BYTES, ForkServer
from paceline.comm.linux import keep_freed_memory
from paceline.comm.shared_memory import SpillAllocator
from paceline.comm.shared_pickle import ObjectReceiver, ObjectSender, SharedObject, share, unpack
from paceline.comm.wakeup import EventFd
from paceline.core import errors
from paceline.core.errors import PacelineError, kind_and_text
from paceline.core.types import Seconds
from paceline.engine import ENGINES
from paceline.engine.base import Job, LoopEvent, Outcome, Progress, RunEvent, Watcher
from paceline.engine.loop import InterruptGuard
from paceline.engine.process_supervisor import EXIT_OK, REASON_S, RankProcesses
from paceline.engine.spmd.capturing import preparing
from paceline.engine.spmd.launch_env import BACKEND, LaunchEnv
from paceline.engine.spmd.process_group import Rendezvous
from paceline.engine.spmd.rank_context import RankContext, open_rank_context
from paceline.engine.torch_settings import TorchSettings
from paceline.engine.worker_metrics import remove_workers_file

# How often main looks for Ctrl-C and the deadline if nothing happens.
TICK_S: Seconds = 1.0

# Longest wait for the ranks to end by themselves after one has sent its failure.
END_S: Seconds = 1.0

# Largest message by which main asks rank 0 to end training.
REASON_BYTES = 4096

# Longest wait for all answers: longer than the ranks' own timeouts.
LONGEST_S: Seconds = 3600.0

# torch.export imports its _trace at the first call: 0.4 s in torch 2.13.
# Modules that a fork server imports so that no rank has to.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.export._trace",
    "torch.fx._graph_pickler",
    __name__,
)


def run_ranks(
    job: Job,
    engine: str,
    fork_server: Callable[[], ForkServer],
    watch: Watcher,
    capture: Callable[[], bytes | None],
) -> Outcome:
    """Run a job on ranks of this host, one for each worker of its strategy, and return its outcome.

    Args:
        job: what the ranks run.
        engine: name of the engine in each rank; it must take the name of a backend.
        fork_server: returns what spawns the ranks, once it has imported what they need.
        watch: receives progress and events of rank 0, and what the loops of all ranks log.
        capture: captures the model for them, while they start.

    Raises:
        PacelineError: the first that a rank has sent; or a rank ended without a message.
    """
    training, forwarded, asked = False, 0, False
    failure: PacelineError | None = None
    outcome: Outcome | None = None
    with contextlib.ExitStack() as closing:
        if job.out is not None:
            closing.callback(remove_workers_file, job.out)
        ranks = closing.enter_context(_started(job, engine, fork_server, capture))
        watch(Progress("starting", None, work=preparing(job.strategy)))
        interrupt = closing.enter_context(contextlib.closing(EventFd()))
        interrupts = closing.enter_context(InterruptGuard(interrupt.set, watch.heard))
        ranks.supervisor.poller.add(interrupt.fileno(), ("interrupt", 0))
        while ranks.supervisor.running and time.monotonic() < ranks.deadline:
            for kind, rank in ranks.poll(TICK_S):
                if kind == "interrupt":
                    interrupt.clear()
                    continue
                if kind == "ended":
                    if ranks.exits[rank] != EXIT_OK:
                        ranks.limit(REASON_S)
                    continue
                try:
                    message, fds, _, _ = socket.recv_fds(ranks.links[rank], MESSAGE_BYTES, 1)
                except ConnectionResetError:  # it has ended without reading what it was sent; its own words come next
                    continue
                match pickle.loads(message) if message else None:
                    case None:  # the rank has closed its end
                        ranks.supervisor.poller.remove(ranks.links[rank].fileno())
                    case "progress", progress:
                        training = True
                        watch(progress)
                    case "event", event:
                        watch.event(event)
                    case "failed", error_class, text:
                        failure = failure or getattr(errors, error_class)(text)
                        ranks.limit(END_S)
                    case ("done",):
                        with contextlib.closing(SharedObject(fds[0])) as shared:
                            state, others, history, account, spans = unpack(shared)
                        model = job.program.build()
                        model.load_state_dict(state)
                        for name, buffer in others.items():
                            model.get_buffer(name).copy_(buffer)
                        outcome = Outcome(state, model, history, account, spans)
            # Before training, SIGINT would end a rank instead of the run: it installs its handler with the engine.
            if training and interrupts.count > forwarded:
                forwarded = interrupts.count
                ranks.supervisor.signal(ranks.supervisor.running, signal.SIGINT)
            if not asked and (reason := watch.stopped) is not None:
                asked = True
                with contextlib.suppress(OSError):  # the rank has ended
                    ranks.links[0].send(reason.encode()[:REASON_BYTES])
        if failure is not None:
            raise failure
        if outcome is None:
            raise ranks.silent_exit()
        if interrupts.first is not None:  # the ranks know of SIGINT alone
            outcome = replace(outcome, account=replace(outcome.account, signal=interrupts.first))
        return outcome


@contextlib.contextmanager
def _started(
    job: Job,
    engine: str,
    fork_server: Callable[[], ForkServer],
    capture: Callable[[], bytes | None],
) -> Iterator[RankProcesses]:
    """Context manager: the ranks, which have the capture of their model or are about to receive it."""

    def start() -> RankProcesses:
        return RankProcesses(fork_server(), f"{__name__}:rank_main", job.strategy.workers, job, {"engine": engine})

    with contextlib.ExitStack() as closing:
        # A thread: it waits for the fork server, which imports, and this one computes.
        with ThreadPoolExecutor(1, "starting ranks") as thread:
            starting = thread.submit(start)
            try:
                captured = capture()
            finally:
                ranks = starting.result()
                closing.callback(ranks.close)
        with contextlib.closing(ObjectSender()) as sender:
            sender.post(captured, ranks.links)
        yield ranks


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

        def send(kind: str, value: Progress | RunEvent) -> None:
            if rank == 0 or isinstance(value, LoopEvent):
                link.send(pickle.dumps((kind, value)))

        def asked() -> str | None:
            try:
                return link.recv(REASON_BYTES, socket.MSG_DONTWAIT).decode(errors="ignore") or None
            except BlockingIOError:
                return None

        watch = Watcher(functools.partial(send, "progress"), functools.partial(send, "event"), asked)
        try:
            job: Job = unpack(SharedObject(job_fd))
            job.torch_settings.apply()
            job = replace(job, captured=functools.partial(_captured, link))
            if job.out is not None:
                liveness.last_acts.append(functools.partial(remove_workers_file, job.out))
            Rendezvous.by_file(rank, args["size"], args["store"]).join(job.timeout_s)
            try:
                with ENGINES.entry(args["engine"]).cls(BACKEND) as engine:
                    outcome: Outcome = engine.run(job, watch)
            finally:
                dist.destroy_process_group()
            if rank == 0:
                state = dict(outcome.state)
                written = {*job.running_buffers} - state.keys()  # persistent=False
                others = {name: buffer for name, buffer in outcome.model.named_buffers() if name in written}
                result = (state, others, list(outcome.history), outcome.account, list(outcome.spans))
                socket.send_fds(link, [pickle.dumps(("done",))], [share(result, SpillAllocator()).fd])
        except BaseException as error:
            with contextlib.suppress(OSError):  # main has ended, or has closed its end
                link.send(pickle.dumps(("failed", *kind_and_text(rank, error))))
            raise SystemExit(1) from error


def _captured(link: socket.socket) -> bytes | None:
    """Return main's capture of the model, which is the first that it sends."""
    with contextlib.closing(ObjectReceiver(link)) as receiver:
        content: bytes | None = receiver.collect()
        return content


# Computes this rank's answer to a request; all ranks get the same request, and call it together.
Answering: TypeAlias = Callable[[Any], Any]


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
        shared = work, TorchSettings()
        self._ranks = RankProcesses(fork_server, f"{__name__}:pool_main", size, shared, {"threads": threads})
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
        while len(answers) < len(ranks.links) and time.monotonic() < ranks.deadline:
            for kind, rank in ranks.poll():
                if kind == "ended":
                    if rank not in answers:
                        ranks.limit(REASON_S)
                    continue
                try:
                    message = self._receivers[rank].collect()
                except (EOFError, ConnectionResetError):
                    ranks.supervisor.poller.remove(ranks.links[rank].fileno())
                    continue
                match message:
                    case "failed", error_class, text:
                        raise getattr(errors, error_class)(text)
                    case "done", answer:
                        answers[rank] = answer
        if len(answers) < len(ranks.links):
            raise ranks.silent_exit()
        return [answers[rank] for rank in range(len(ranks.links))]


def pool_main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """Entry of a rank's process.

    Args:
        args: ``rank``, ``size``, ``threads``, and ``store``, the path of the rendezvous file.
        fds: the work with torch's settings, and a socket for requests and answers.
    """
    keep_freed_memory()
    work_fd, link_fd = fds
    with socket.socket(fileno=link_fd) as link:
        try:
            work: PoolWork
            work, settings = unpack(SharedObject(work_fd))
            settings.apply()
            torch.set_num_threads(args["threads"])
            Rendezvous.by_file(args["rank"], args["size"], args["store"]).join(work.timeout_s)
            try:
                with open_rank_context(LaunchEnv.current(), BACKEND, "cpu", work.timeout_s, watched=True) as context:
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
