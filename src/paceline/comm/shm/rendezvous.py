"""How the ranks of a process group find each other's memory, and how one wakes another.

Two kinds of segment are shared. The *region* belongs to a group and holds its counters, data and failures. A *wakeup
page* belongs to a process and holds one word, on which the process sleeps whatever group the news comes from, since it
can sleep on one word only. Members find both through ``/proc/PID/fd/N`` of the owner, so that nothing has a name that
could outlive the job. Linux only.
"""

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from paceline.comm import liveness
from paceline.comm.shared_memory import SharedMemory
from paceline.comm.shm.region import LINE, OTHERWISE, TOKEN_BYTES, WORD, Peer, Region, RegionLayout
from paceline.comm.wakeup import Futex, Wakeup
from paceline.core.errors import CollectiveError, InputError, WaitTimeoutError
from paceline.core.types import Nanoseconds, Seconds

# Bytes that a rank shows the others in one round: smaller rounds have more barriers. On 2 cores of an Intel Xeon
# 100 MiB among 8 ranks took 180 ms with 1 MiB, 162 with 2 and 165 with 4.
STAGE_BYTES = 2**21

# Longest spin of a wait. With more ranks than cores a longer one keeps those from running that it waits for.
SPIN_NS: Nanoseconds = 50_000


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where another process finds a segment."""

    pid: int
    fd: int
    size_bytes: int
    token: str

    def open(self) -> SharedMemory:
        """Map the segment.

        Raises:
            OSError: its process has ended, or belongs to another user or container.
            CollectiveError: the descriptor is another file by now.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size == self.size_bytes:
            segment = SharedMemory(fd, self.size_bytes)
            if bytes(segment.buffer[:TOKEN_BYTES]).hex() == self.token:
                return segment
            segment.close()
        else:
            os.close(fd)
        raise CollectiveError(f"{path} is not what was to be found there")


def create_segment(name: str, size_bytes: int, *, reserved_bytes: int = 0) -> SharedMemory:
    """Create shared memory that peers can find by its :func:`address_of`."""
    segment = SharedMemory.create(name, size_bytes, reserved_bytes=reserved_bytes)
    segment.buffer[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    return segment


def address_of(segment: SharedMemory) -> SegmentAddress:
    """Return where peers find a segment that this process has created."""
    return SegmentAddress(os.getpid(), segment.fd, segment.size_bytes, bytes(segment.buffer[:TOKEN_BYTES]).hex())


@cache
def own_wakeup_page() -> SharedMemory:
    """Return this process's wakeup page; one for all its groups."""
    return create_segment("wakeup", 2 * LINE)


def wakeup_on(page: SharedMemory) -> Wakeup:
    """Return the wakeup of a page's owner, for the owner or a peer."""
    word = page.buffer[LINE : LINE + WORD].cast("q")
    return Wakeup(Futex(word), word, SPIN_NS)


@cache
def peer_at(page: SegmentAddress) -> Peer:
    """Return the process that owns a wakeup page; the same object for all groups. Raises as SegmentAddress.open."""
    return Peer(liveness.open_pid(page.pid), wakeup_on(page.open()))


def host_id() -> str:
    """Return a name of this host that holds until it restarts; containers and network namespaces differ."""
    namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])


def of_this_start(store: Store) -> Store:
    """Return the store with a prefix that no earlier start of these ranks has used.

    The agent of torchrun --max-restarts keeps its store from one start to the next, with the addresses of the dead.
    """
    return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def rendezvous(store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: Seconds) -> Region:
    """Find the other members and the group's memory, which the first rank creates.

    Args:
        store: of this group alone.
        name: of the group, for messages.
        rank: this process's, in the group.
        ranks: the members' ranks in the whole job.
        timeout_s: longest wait for the others.

    Raises:
        InputError: members are on different hosts, or can't map each other's memory.
        WaitTimeoutError: some did not come in time.
    """
    layout = RegionLayout(len(ranks), STAGE_BYTES)
    created = create_segment("group", layout.size_bytes, reserved_bytes=layout.channels) if rank == 0 else None
    segment_address = asdict(address_of(created)) if created is not None else None
    page_address = asdict(address_of(own_wakeup_page()))
    own = {"host": host_id(), "name": socket.gethostname(), "page": page_address, "segment": segment_address}
    keys = [str(member) for member in range(len(ranks))]
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [str(ranks[member]) for member, key in enumerate(keys) if not store.check([key])]
        raise WaitTimeoutError(
            f"rank {ranks[rank]} waited {timeout_s:g} s for ranks {', '.join(absent)} to join group {name}; "
            "start them, or write a larger timeout="
        ) from error
    members = [json.loads(store.get(key)) for key in keys]
    for other, member in zip(ranks, members, strict=True):
        if member["host"] != members[0]["host"]:
            raise InputError(
                f"ranks {ranks[0]} and {other} are on different hosts ({members[0]['name']}, {member['name']}), but "
                f"backend shm joins CPU ranks of one host; {OTHERWISE}"
            )
    try:
        peers = [peer_at(SegmentAddress(**member["page"])) for member in members]
        segment = created or SegmentAddress(**members[0]["segment"]).open()
    except (OSError, CollectiveError) as error:
        raise InputError(
            f"rank {ranks[rank]} can't reach the memory of another rank of group {name}: {error}; backend shm is for "
            f"ranks of one user in one container, that are all still there; {OTHERWISE}"
        ) from error
    return Region(name, rank, ranks, layout, peers, segment)
