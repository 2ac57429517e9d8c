"""How the ranks of a job meet: in a store, whose first entries tell who has come, and to run what.

Rank 0 keeps the store, unless torchrun does, and listens at MASTER_ADDR alone::

    rank 0    listen -- arrival 1 ---------------------- 3 have come: begin
    rank 1              connect -- arrival 2 ----------- 3 have come: begin
    rank 2                           connect -- arrival 3: begin
    rank 1 again                                          connect -- arrival 4: refused, the others go on

Every rank reads the arrivals in the same order, so all come to the same conclusion: at the first arrival that
contradicts another one all of them end, and each names both. Nothing is unpickled, and no collective has begun whose
sizes could differ.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore

from paceline.checkpoint.fingerprint import differences, versions
from paceline.comm.shm.rendezvous import host_id
from paceline.core.errors import InputError, PacelineError, WaitTimeoutError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.spmd.bounded_store import bounded

# What listens at the port and has not answered by then is no store: a store answers from a thread of its own.
ANSWER_S: Seconds = 8.0

# How long rank 0, which keeps the store, stays after the last arrival for the others to read why there is no job.
LINGER_S: Seconds = 5.0

# First and longest pause between two looks at the store.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1

# By it, torchrun says that its agent keeps the store.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

# By it, Gloo is told where to listen; else it takes the address that the host's name stands for.
INTERFACE = "GLOO_SOCKET_IFNAME"

# The request for an interface's address, which Python does not name (linux/sockios.h).
_SIOCGIFADDR = 0x8915


def keeps_store(rank: int) -> bool:
    """Return whether this process keeps the job's store, so that it ends with it."""
    return rank == 0 and os.environ.get(AGENT_STORE) != "True"


@dataclass(frozen=True)
class RankArrival:
    """A rank that has come.

    Args:
        ticket: counts arrivals, from 1.
        host: its name, for messages.
        host_id: equal for processes that see each other.
        terms: what all ranks must have in common, by name.
    """

    ticket: int
    rank: int
    pid: int
    host: str
    host_id: str
    terms: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def ended(self) -> bool:
        """Whether its process is known to have ended; one on another host is not."""
        return self.host_id == host_id() and not Path(f"/proc/{self.pid}").exists()


def attend(
    store: Store, rank: int, size: int, terms: Mapping[str, str], timeout_s: Seconds, *, may_join: bool = False
) -> bool:
    """Wait until all ranks have come; all call it.

    Args:
        store: with a prefix of this run.
        rank: of this process.
        size: how many ranks there should be.
        terms: what they must have in common, by name; the number of ranks and versions are added.
        timeout_s: longest wait.
        may_join: whether a rank may be started again after all have come, while the others train.

    Returns:
        Whether all have come before this process, which is to join them.

    Raises:
        PacelineError: two processes have the same rank, or ranks differ in a term; names both.
        WaitTimeoutError: ranks have not come; names them.
    """
    if not 0 <= rank < size:
        raise InputError(f"RANK={rank} WORLD_SIZE={size}: ranks are 0 to WORLD_SIZE - 1; start each of them once")
    terms = {"number of ranks": str(size), **versions(), **terms}
    own = RankArrival(store.add("arrivals", 1), rank, os.getpid(), socket.gethostname(), host_id(), terms)
    store.set(f"arrival {own.ticket}", json.dumps(asdict(own)))
    arrived = list[RankArrival]()
    deadline, pauses = time.monotonic() + timeout_s, _pauses()
    while True:
        arrived += _read(store, len(arrived))
        # torchrun's agent keeps the store from one start of the ranks to the next.
        believed = [each for each in arrived if may_join or keeps_store(0) or not each.ended]
        if may_join and _comes_later(believed, own):
            return True
        present, conflict = _present(believed, own)
        if conflict is not None:
            _linger(store, believed, keeps_store(rank))
            raise PacelineError(f"{conflict}; start each rank once, all with the same script and arguments")
        if len(present) == size:
            return False
        if time.monotonic() > deadline:
            absent = [str(each) for each in range(size) if each not in present]
            raise WaitTimeoutError(
                f"rank {rank} waited {timeout_s:g} s for rank{'s' * (len(absent) > 1)} {', '.join(absent)} of {size}, "
                f"and only {', '.join(map(str, present.values()))} came; start them all, or write a larger timeout_s="
            )
        time.sleep(next(pauses))


def _pauses() -> Iterator[Seconds]:
    return (min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(i, 10)) for i in itertools.count())


def _read(store: Store, known: int) -> list[RankArrival]:
    """Return the arrivals after the first so many."""
    tickets = range(known + 1, store.add("arrivals", 0) + 1)
    return [RankArrival(**json.loads(store.get(f"arrival {ticket}"))) for ticket in tickets]


def _present(arrived: Sequence[RankArrival], own: RankArrival) -> tuple[dict[int, RankArrival], str | None]:
    """Return the ranks that have come, and how the first arrival that contradicts one before it does so.

    What comes after all have come contradicts nobody but itself.
    """
    present = dict[int, RankArrival]()
    for each in arrived:
        first = arrived[0]
        complete = len(present) == int(first.terms["number of ranks"])
        if complete and each != own:
            continue
        if found := differences(first.terms, each.terms, (str(first), str(each))):
            return present, found
        if (other := present.setdefault(each.rank, each)) is not each:
            places = [f"process {one.pid} on {one.host}" for one in (other, each)]
            return present, f"rank {each.rank} was started twice: {places[0]} and {places[1]}"
    return present, None


def _comes_later(arrived: Sequence[RankArrival], own: RankArrival) -> bool:
    """Return whether all ranks have come before a process that has what they have in common."""
    before = [each for each in arrived if each.ticket < own.ticket]
    present, conflict = _present(before, own)
    if conflict is not None or not before or len(present) < int(before[0].terms["number of ranks"]):
        return False
    return not differences(before[0].terms, own.terms, (str(before[0]), str(own)))


def _linger(store: Store, arrived: Sequence[RankArrival], keeps: bool) -> None:
    """Announce that this rank has read why there is no job; the one that keeps the store waits for the others."""
    with contextlib.suppress(RuntimeError):  # the store is gone with the process that kept it
        read, came, seen = store.add("read", 1), len(arrived), time.monotonic()
        wanted = max(int(each.terms["number of ranks"]) for each in arrived)
        while keeps and read < max(came, wanted) and time.monotonic() < seen + LINGER_S:
            time.sleep(_LONGEST_PAUSE_S)
            read, before, came = store.add("read", 0), came, store.add("arrivals", 0)
            seen = time.monotonic() if came > before else seen


def job_store(rank: int, timeout_s: Seconds) -> Store:
    """Return the store of the job that the environment names; rank 0 keeps it, unless torchrun does.

    Raises:
        InputError: the environment is incomplete, or something else listens at the port.
        WaitTimeoutError: nothing listens there.
    """
    host, port = _address()
    bound = timedelta(seconds=timeout_s)
    if keeps_store(rank):
        listener = _listener(host, port)
        if listener is not None:
            # torch 2.13 would listen on all interfaces, to anybody.
            fd = listener.detach()
            return TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=bound,
                master_listen_fd=fd,
            )
    _wait_for_listener(rank, host, port, timeout_s)
    answer_s = min(timeout_s, ANSWER_S)
    try:
        store = bounded(
            # of a stranger it asks again until the time is up: no longer than it is waited for
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=answer_s)),
            answer_s,
            f"what listens at port {port}",
        )
    except (RuntimeError, WorkerError) as error:
        raise InputError(
            f"rank {rank} found no store of torch at MASTER_ADDR={host} MASTER_PORT={port}: {holder_of(port)} "
            f"({str(error).splitlines()[0]}); write another MASTER_PORT, for instance {_free_port(host)}"
        ) from error
    store.set_timeout(bound)
    return store


def _address() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise InputError(
            f"MASTER_ADDR={host} MASTER_PORT={port} is no address at which ranks could meet; start them with torchrun, "
            "or write MASTER_ADDR=127.0.0.1 MASTER_PORT=29500, say, and RANK and WORLD_SIZE"
        )
    return host, int(port)


def _listener(host: str, port: int) -> socket.socket | None:
    """Listen at an address of this host alone; None if somebody does already.

    Where the address is none of this host's, as that of a service in front of it, listen on all interfaces.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", port), family=family, backlog=1024)


def _wait_for_listener(rank: int, host: str, port: int, timeout_s: Seconds) -> None:
    deadline, pauses = time.monotonic() + timeout_s, _pauses()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"rank {rank} waited {timeout_s:g} s for rank 0 to listen at MASTER_ADDR={host} MASTER_PORT={port} "
                    f"({error}); start rank 0 there, or write a larger timeout_s="
                ) from error
        time.sleep(next(pauses))


def holder_of(port: int) -> str:
    """Return which process of this host listens at a port, in words."""
    inodes = set[str]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = (row.split() for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:])
            inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            link = os.readlink(fd)
            if link.startswith("socket:[") and link[8:-1] in inodes:
                pid = fd.parts[2]
                return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()}) listens there"
    return "another program listens there"


def _free_port(host: str) -> int:
    with contextlib.suppress(OSError), socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
    return 29501


def own_address(*, one_host: bool) -> str:
    """Return the address by which the other ranks reach this host: that of the interface that Gloo is told, or of the
    way to the rendezvous; loopback if all ranks are known to be on this host.

    Raises:
        InputError: there is none that other hosts could reach.
    """
    if all_here(one_host=one_host):
        return "127.0.0.1"
    host, interface = os.environ.get("MASTER_ADDR", ""), os.environ.get(INTERFACE, "").split(",")[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if interface:
                return _address_of(probe, interface)
            probe.connect((host, int(os.environ.get("MASTER_PORT", "1"))))  # of a datagram socket: nothing is sent
            found: str = probe.getsockname()[0]
    except OSError as error:
        where = f"{INTERFACE}={interface}" if interface else f"MASTER_ADDR={host}"
        raise InputError(f"{where} gives no address by which other hosts reach this one: {error}") from error
    if found.startswith("127."):
        raise InputError(
            f"MASTER_ADDR={host} is an address of this host alone; name the interface that the hosts share by "
            f"{INTERFACE}"
        )
    return found


def interface_with(address: str) -> str:
    """Return the name of this host's network interface that has an IPv4 address; raises InputError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if _address_of(probe, name) == address:
                    return name
    raise InputError(
        f"no network interface of {socket.gethostname()} has the address {address}; name it by {INTERFACE}"
    )


def _address_of(probe: socket.socket, interface: str) -> str:
    """Return an interface's IPv4 address; ``probe``: any datagram socket."""
    asked = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
    return socket.inet_ntoa(asked[20:24])


def all_here(*, one_host: bool) -> bool:
    """Return whether all ranks are known to be on this host; ``one_host``: torchrun says so."""
    return one_host or os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
