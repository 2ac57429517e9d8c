"""A rank of a run with servers of A: its replica goes its own pace, as the policy says."""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from paceline.core.errors import InputError, PacelineError, WorkerError, encode_failure
from paceline.engine.base import Job, Outcome, Progress, Watcher
from paceline.engine.distributed.agreement import check_job
from paceline.engine.distributed.rank_server import RUN, FirstServer, RankHost, ServerThread
from paceline.engine.loop import InterruptGuard
from paceline.engine.run_context import first_state
from paceline.engine.server import messages
from paceline.engine.server.calls import SocketPeer
from paceline.engine.server.gang import Gang, GangListener
from paceline.engine.server.peer import PeerError
from paceline.engine.server.push_client import CancelFlag
from paceline.engine.server.replica_group import follow, lead
from paceline.engine.server.served_replica import on_servers_clock, run_replica
from paceline.engine.server.server_link import ServerLinks
from paceline.engine.server.wire import StreamAddress
from paceline.engine.server_optimizer import usual_servers
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.engine.spmd.rank_context import RankContext, open_rank_context
from paceline.engine.spmd.rendezvous import own_address
from paceline.engine.spmd.replica_group import PeerExited
from paceline.engine.worker_metrics import training_spans, workers_file
from paceline.replica.flat_state import digest_of, write


class ServedRank:
    """One rank's part of a run.

    Args:
        job: what is run.
        world: this rank's launch environment.
        backend: of the process group by which the ranks find each other.
        device: of this rank.
        watch: receives progress.
        closing: what has to be released, however the run ends; for the caller to close.
    """

    def __init__(
        self, job: Job, world: LaunchEnv, backend: str, device: str, watch: Watcher, closing: contextlib.ExitStack
    ) -> None:
        self._job, self._world, self._watch, self._closing = job, world, watch, closing
        self._module, state = first_state(job.program, job.running_buffers)
        self._layout = state.layout
        self._cancel = CancelFlag(RUN)
        self._thread: ServerThread | None = None
        self._gang: Gang | None = None
        self._links: ServerLinks | None = None
        self._initialized = dist.is_initialized()
        self._leaves = ""
        """The signal by which this rank leaves the others, which go on."""
        self._elsewhere = False
        """Whether this rank is on another host than the first server."""
        self._signals = queue.SimpleQueue[bool]()
        """An entry for each Ctrl-C; False: the run is over."""
        self._interrupts = InterruptGuard(lambda: self._signals.put(True), watch.heard)
        self._addresses = self._meet(backend, device, digest_of(self._module, state.layout))
        self._servers = list[SocketPeer]()

    @property
    def _replica(self) -> int:
        return self._job.strategy.mesh.coordinate(self._world.rank).replica

    def outcome(self) -> Outcome:
        """Run to the end."""
        with self._interrupts, contextlib.ExitStack() as leaving:
            self._watch(Progress("starting", 0.0))
            self._servers = [self._connected(number) for number in range(len(self._addresses))]
            leaving.callback(self._leave)
            if self._world.rank == 0:
                self._start()
            relay = threading.Thread(target=self._relay_signals, name="signals", daemon=True)
            relay.start()
            leaving.callback(self._signals.put, False)
            refused: PacelineError | None = self._asked("opened")
            if refused is not None:
                raise refused
            try:
                self._train()
            except Exception:
                if self._thread is not None:  # the others need its server to the end
                    with contextlib.suppress(PacelineError):
                        self._taken()
                raise
            result = self._taken()
            if isinstance(result, PacelineError):
                raise result
        model = write(self._module, messages.state_of(self._layout, result.state))
        spans = training_spans(result.spans, result.began_ns) if self._job.trace else []
        return Outcome(model.state_dict(), model, result.history, result.account, spans)

    # -------------------------------------------------------------------------------------------------------- the start

    def _meet(self, backend: str, device: str, digest: str) -> list[StreamAddress]:
        """Start this rank's server, if it has one, and exchange where servers listen; all ranks call it together."""
        job, world = self._job, self._world
        with open_rank_context(world, backend, device, job.timeout_s, watched=True) as context:
            check_job(job, digest, context)
            self._elsewhere = context.registry.own.kernel != context.registry.peers[0].kernel
            if job.strategy.spread:
                self._gang = self._gang_of(context)
            servers = self._server_ranks(context)
            if world.rank in servers:
                address = own_address(one_host=world.one_host)
                self._thread = ServerThread(functools.partial(self._new_server, context, servers, address), address)
                self._closing.callback(self._thread.close)
            if world.rank == 0:
                self._closing.enter_context(workers_file(job.out, {}, context.registry.workers(job.strategy.mesh)))
            found: Sequence[StreamAddress | None]
            found = context.gather(None if self._thread is None else self._thread.address, "the others' servers")
            return [address for rank in servers if (address := found[rank]) is not None]

    def _server_ranks(self, context: RankContext) -> Sequence[int]:
        """Return the ranks with servers: the first of each host in turn, then the second of each."""
        hosts = dict[str, list[int]]()
        for peer in context.registry.peers:
            hosts.setdefault(peer.kernel, []).append(peer.rank)
        in_turn = [rank for each in zip_longest(*hosts.values()) for rank in each if rank is not None]
        return in_turn[: self._job.strategy.servers or usual_servers(len(hosts), self._layout.parameter_bytes)]

    def _gang_of(self, context: RankContext) -> Gang:
        """Return the workers of this rank's replica; all ranks call it together."""
        if self._initialized:
            raise InputError(
                "the workers of each replica make a process group of their own, but this process has one already; call "
                "torch.distributed.destroy_process_group() before"
            )
        first = self._job.strategy.mesh.replica_ranks(self._replica).start
        interface, listener = own_address(one_host=self._world.one_host), None
        if first == self._world.rank:
            listener = GangListener(interface)
            self._closing.callback(listener.close)
        addresses = context.gather(None if listener is None else listener.address, "the others' replicas")
        return Gang(self._job, self._replica, interface, addresses[first], listener)

    def _new_server(self, context: RankContext, servers: Sequence[int], address: str) -> RankHost:
        if self._world.rank:
            return RankHost(address, self._job)
        return FirstServer(address, self._job, [str(peer) for peer in context.registry.peers], servers, self._watch)

    def _connected(self, number: int, rank: int | None = None) -> SocketPeer:
        """Return a server, as this rank calls it, or as the first server does (rank -1)."""
        hello = {"rank": self._world.rank if rank is None else rank}
        try:
            peer = SocketPeer(self._addresses[number], hello, self._told)
        except (OSError, EOFError) as error:
            host, port = self._addresses[number][:2]
            raise WorkerError(
                f"rank {self._world.rank} can't reach server {number} at {host}:{port}: {error}; let the hosts connect "
                "to each other, or name the interface that they share by GLOO_SOCKET_IFNAME"
            ) from error
        self._closing.callback(peer.close)
        return peer

    def _start(self) -> None:
        """Have the first server open and begin the run."""
        assert self._thread is not None, "rank 0 has the first server"
        assert isinstance(self._thread.host, FirstServer), "rank 0 has the first server"
        others = [self._connected(number, -1) for number in range(1, len(self._addresses))]
        self._thread.submit(self._thread.host.start(others)).result()

    def _told(self, method: str, *args: Any) -> None:
        """Take what the first server tells this rank: that an attempt is cancelled, or that the run has failed."""
        if method == "cancel":
            self._cancel.cancel(*args)
        elif method == "break_off":
            for server in self._servers[1:]:
                server.close()
            if self._links is not None:
                self._links.break_off()

    # --------------------------------------------------------------------------------------------------------- the loop

    def _train(self) -> None:
        """Run this rank's replica, and tell the first server how it has ended."""
        first, rank = self._servers[0], self._world.rank
        self._links = links = ServerLinks(RUN, self._servers, 0.0)
        try:
            try:
                ended = self._looped(links)
            except PeerExited:  # the first server sees which worker it was, and its replica is no more
                ended = messages.Ended(None, [])
            if ended.spans and self._elsewhere:
                ended = ended._replace(spans=on_servers_clock(ended.spans, links.first))
            if self._leaves:
                raise WorkerError(f"rank {rank} was asked to end by {self._leaves}; the others go on without it")
            first.begin("left", rank, ended, self._interrupts.first).result()
        except PeerError as error:
            raise self._server_lost(error) from error
        except BaseException as error:
            if self._leaves:
                raise
            with contextlib.suppress(PeerError):
                first.begin("failed", rank, encode_failure(self._replica, error)).result()
            raise

    def _looped(self, links: ServerLinks) -> messages.Ended:
        """Run the loop of this rank's replica, or follow the rank that does."""
        assignment = messages.ReplicaAssignment(RUN, self._replica, 0, 0, 0)
        if self._gang is None:
            return run_replica(self._job, assignment, links, self._cancel)
        gang, environment = self._gang, dict(os.environ)
        if (loop := self._job.loop) is not None:

            def restored(worker: Any) -> None:
                os.environ |= environment  # in a process group of their own, a replica's workers have other ranks
                loop(worker)

            gang = replace(gang, job=replace(self._job, loop=restored))
        number = self._world.rank - self._job.strategy.mesh.replica_ranks(self._replica).start
        try:
            return follow(gang, assignment, number) if number else lead(gang, assignment, links, self._cancel)
        finally:
            os.environ |= environment

    def _taken(self) -> messages.Result | PacelineError:
        """Return the result of the run, or why there is none, once it is over; rank 0 waits until all have it."""
        result: messages.Result | PacelineError = self._asked("outcome")
        self._asked("taken", self._world.rank)
        if self._world.rank == 0:
            self._asked("all_taken")
        return result

    def _asked(self, method: str, *args: object) -> Any:
        """Call a method of the first server and return the result; its end ends this rank."""
        try:
            return self._servers[0].begin(method, *args).result()
        except PeerError as error:
            raise self._server_lost(error) from error

    def _server_lost(self, error: PeerError) -> PacelineError:
        """Return why a server does not answer: the run has failed, or the rank that it is of is no more."""
        with contextlib.suppress(PeerError):
            failure = self._servers[0].begin("outcome").result()
            if isinstance(failure, PacelineError):
                return failure
        return WorkerError(f"a rank with a server died, and its slice of A with it: {error}")

    def _relay_signals(self) -> None:
        """Tell the first server of each Ctrl-C: the first one ends training, the second one all waiting.

        SIGTERM, with which torchrun's agent ends the ranks of its own host after the death of one, does not end those
        of other hosts.
        """
        calls: list[tuple[Any, ...]] = [("ask", "interrupt"), ("insist",)]
        with contextlib.suppress(PeerError):
            while self._signals.get():
                asked = self._interrupts.first
                alone = self._elsewhere and self._thread is None and self._job.on_death != "stop"
                if asked == "SIGTERM" and alone and not self._leaves:
                    self._leaves, calls = asked, [("leave", self._world.rank, asked)]
                if calls:
                    self._servers[0].begin(*calls.pop(0)).result()

    def _leave(self) -> None:
        for server in self._servers:
            server.close()
