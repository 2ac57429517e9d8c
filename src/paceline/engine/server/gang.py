"""How the workers of one replica that pushes to servers find each other, on one host or on several.

::

    leader      listen ................. who is where, and the store of their process group ... commands
    follower    connect, prove (wire.py) ...................................................... its part

On the leader's host a follower reads A and writes Δ in the leader's memory. One on another host has memory of its own:
its part of A comes with the command to read it, and its part of Δ goes with the word that it is written.
"""

import contextlib
import functools
import os
import queue
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from paceline.comm.shm.rendezvous import host_id
from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.mesh import Coordinate
from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.own_states import OwnBuffer
from paceline.engine.server import wire
from paceline.engine.server.run_control import EventLoopThread
from paceline.engine.server.wire import Listener, StreamAddress
from paceline.engine.spmd.process_group import Rendezvous
from paceline.engine.spmd.rendezvous import interface_with
from paceline.engine.spmd.replica_group import AdoptCommand, CommandPipe, PartDone, PeerExited

LOOPBACK = "127.0.0.1"

# Pause before another try to reach a leader.
AGAIN_S: Seconds = 0.2

# Tensors that are sent by one call of the system, which takes 1,024 at most.
SENT_AT_ONCE = 256

_SIZE = struct.Struct("<Q")


class Arrival(NamedTuple):
    """A follower that has come.

    Args:
        worker: its number among the workers of its replica.
        host: equal for processes that can share memory.
        connection: to it.
    """

    worker: int
    host: str
    connection: socket.socket


class GangListener:
    """Where the leader of a replica accepts its followers.

    Args:
        interface: address of the interface that it listens at.

    Raises:
        WorkerError: it can't listen there.
    """

    def __init__(self, interface: str) -> None:
        self._arrived = queue.SimpleQueue[Arrival]()
        self._thread = EventLoopThread("listener of a replica")
        self.address = self._thread.submit(self._listen(interface)).result()

    def next(self, timeout_s: Seconds) -> Arrival | None:
        """Return who comes next; None: nobody does in time."""
        try:
            return self._arrived.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Listen no more; idempotent."""
        self._thread.close()

    async def _listen(self, interface: str) -> StreamAddress:
        address = Listener(interface, self._serve).address()
        if address is None:
            raise WorkerError(f"the first worker of a replica can't listen at {interface}")
        return address

    async def _serve(self, connection: socket.socket, hello: Any) -> None:
        self._arrived.put(Arrival(int(hello["worker"]), str(hello["host"]), connection.dup()))


class _GroupInfo(NamedTuple):
    """What all workers of a replica are told.

    Args:
        host: at which the store of their process group listens.
        port: its port.
        hosts: of each worker, the number of its host.
    """

    host: str
    port: int
    hosts: Sequence[int]

    def rendezvous(self, worker: int, interface: str, store: Any) -> Rendezvous:
        """Return that of a worker, whose host has this address; ``store`` makes a store of torch."""
        there = [other for other, host in enumerate(self.hosts) if host == self.hosts[worker]]
        name = interface_with(interface) if len(there) < len(self.hosts) else ""
        return Rendezvous(worker, len(self.hosts), store, there.index(worker), len(there), name, kept=True)


@dataclass(frozen=True)
class RemotePipe(CommandPipe):
    """One end of the pipe between a leader and a follower on another host; some messages have tensors with them."""

    _socket: socket.socket
    """The same connection, for tensors."""
    _carried: dict[type, list[Tensor]] = field(default_factory=dict)
    """By the message after which they travel."""
    _own: list[OwnBuffer] = field(default_factory=list)
    """What the follower keeps, which travels after those of its Δ, if it keeps anything."""

    def bind(self, read: list[Tensor], written: list[Tensor], own: OwnBuffer | None) -> None:
        """Say what the follower reads of A, what it writes of Δ, and where what it keeps is, at this end."""
        self._carried.update({AdoptCommand: read, PartDone: written})
        self._own[:] = [] if own is None else [own]

    def send(self, message: Any) -> None:
        super().send(message)
        tensors = self._carried.get(type(message), [])
        parts = [_bytes_of(tensor.contiguous()) for tensor in tensors if tensor.numel()]
        if isinstance(message, PartDone):
            parts += [part for own in self._own for part in (memoryview(_SIZE.pack(own.written.nbytes)), own.written)]
        with self._peer_may_exit():
            for first in range(0, len(parts), SENT_AT_ONCE):
                wire.send_all(self._socket, parts[first : first + SENT_AT_ONCE])

    def receive(self) -> Any:
        message = super().receive()
        with self._peer_may_exit():
            for tensor in self._carried.get(type(message), []):
                if tensor.numel():
                    self._receive_into(tensor)
            if isinstance(message, PartDone):
                for own in self._own:
                    (size,) = _SIZE.unpack(wire.read(self._socket, _SIZE.size))
                    there = own.cleared(size)
                    wire.read_into(self._socket, memoryview(bytearray(size)) if there is None else there)
        return message

    def _receive_into(self, tensor: Tensor) -> None:
        whole = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        wire.read_into(self._socket, _bytes_of(whole))
        if whole is not tensor:
            tensor.copy_(whole)

    @contextlib.contextmanager
    def _peer_may_exit(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise PeerExited(self._peer) from error


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Gang:
    """The workers of one replica, as they find each other.

    Args:
        job: what is run.
        replica: its number.
        interface: address by which other hosts reach this one.
        address: where the leader listens.
        listener: the leader's; None: this worker follows.
    """

    job: Job
    replica: int
    interface: str
    address: StreamAddress
    listener: GangListener | None = None

    @property
    def places(self) -> list[Coordinate]:
        """Places of the workers, the leader's first."""
        mesh = self.job.strategy.mesh
        return [mesh.coordinate(rank) for rank in mesh.replica_ranks(self.replica)]

    @contextlib.contextmanager
    def led(self) -> Iterator[tuple[list[CommandPipe], Rendezvous]]:
        """Context manager of the leader: pipes to all followers, in their order, and how they form a process group.

        Raises:
            WaitTimeoutError: some do not come in time.
        """
        assert self.listener is not None, "a leader has a listener"
        with contextlib.ExitStack() as closing:
            arrivals = self._arrivals(self.listener, closing)
            self.listener.close()
            ids = [host_id(), *(arrival.host for arrival in arrivals)]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(ids))}
            listening = socket.create_server((LOOPBACK if len(numbers) == 1 else self.interface, 0))
            host, port = listening.getsockname()[:2]
            info = _GroupInfo(host, port, [numbers[name] for name in ids])
            store = self._store(info, listening.detach())
            pipes = [
                self._pipe(each.connection, self.places[each.worker], closing, far=each.host != ids[0])
                for each in arrivals
            ]
            for pipe in pipes:
                pipe.send(tuple(info))
            yield pipes, info.rendezvous(0, self.interface, lambda: store)

    def _arrivals(self, listener: GangListener, closing: contextlib.ExitStack) -> list[Arrival]:
        """Return all followers in their order."""
        arrived = dict[int, Arrival]()
        places, timeout_s = self.places, self.job.timeout_s
        deadline = time.monotonic() + timeout_s
        while len(arrived) < len(places) - 1:
            arrival = listener.next(deadline - time.monotonic())
            if arrival is None:
                absent = [place.label for i, place in enumerate(places) if i and i not in arrived]
                raise WaitTimeoutError(
                    f"replica {places[0].label} waited {timeout_s:g} s for {', '.join(absent)} to start; "
                    "write a larger timeout_s="
                )
            arrived[arrival.worker] = arrival
            closing.enter_context(arrival.connection)
        return [arrived[i] for i in range(1, len(places))]

    @contextlib.contextmanager
    def followed(self, worker: int) -> Iterator[tuple[CommandPipe, Rendezvous]]:
        """Context manager of a follower: the pipe to its leader, and how the workers form a process group.

        Raises:
            PeerExited: the leader is no more.
            WorkerError: it does not answer in time.
        """
        connection = self._connected(worker)
        with connection, contextlib.ExitStack() as closing:
            pipe = self._pipe(connection, self.places[0], closing, far=self.address.host_id != host_id())
            info = _GroupInfo(*pipe.answer("who is where"))
            yield pipe, info.rendezvous(worker, self.interface, functools.partial(self._found_store, info))

    def _connected(self, worker: int) -> socket.socket:
        """Return a connection to the leader, which listens since before its address was told, but may be busy."""
        deadline = time.monotonic() + self.job.timeout_s
        while True:
            try:
                return wire.connect(self.address, {"worker": worker, "host": host_id()})
            except ConnectionRefusedError as error:
                raise PeerExited("the replica's first worker") from error
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise WorkerError(f"replica {self.places[worker].label} found no leader: {error}") from error
                time.sleep(AGAIN_S)  # of a leader that is busy nothing else is heard

    def _found_store(self, info: _GroupInfo) -> Store:
        """Return the store that the leader keeps.

        Raises:
            PeerExited: the leader is no more; torch would try to connect for as long as it may take to start.
        """
        with contextlib.suppress(TimeoutError):  # it may be busy
            try:
                socket.create_connection((info.host, info.port), wire.CONNECT_S).close()
            except ConnectionRefusedError as error:
                raise PeerExited("the replica's first worker") from error
        return self._store(info)

    def _store(self, info: _GroupInfo, listening: int | None = None) -> Store:
        """Return the store of the replica's process group; who listens, by this descriptor, keeps it."""
        return TCPStore(
            info.host,
            info.port,
            is_master=listening is not None,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=self.job.timeout_s),
            master_listen_fd=listening,  # without it, torch 2.13 would listen on all interfaces
        )

    def _pipe(
        self, connection: socket.socket, peer: Coordinate, closing: contextlib.ExitStack, *, far: bool
    ) -> CommandPipe:
        connection.settimeout(None)
        messages = closing.enter_context(Connection(os.dup(connection.fileno())))
        what = messages, f"replica {peer.label}", self.job.timeout_s
        return RemotePipe(*what, connection) if far else CommandPipe(*what)
