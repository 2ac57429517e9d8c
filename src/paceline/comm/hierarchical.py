"""A call made of several, each begun once the one before it has ended.

The ``hierarchical`` backend of torch.distributed: shared memory inside each host, Gloo between hosts.

::

    host A          ranks 0 1 2 3 --reduce--> 0 --+              +--> 0 --broadcast--> 0 1 2 3
                    shared memory                 |  all-reduce  |    shared memory
    host B          ranks 4 5 6 7 --reduce--> 4 --+     Gloo     +--> 4 --broadcast--> 4 5 6 7

Of each host one rank alone talks to the others, so a host sends 2·(H−1)/H·|A|·b in an all-reduce over H hosts, however
many ranks it has. All-reduce, broadcast and barrier, which data parallelism is made of, go this way; everything else
goes through Gloo as it is.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    Store,
)
from torch.futures import Future

from paceline.comm.shm.collectives import plain, vector
from paceline.comm.shm.process_group import PythonProcessGroup, ShmProcessGroup
from paceline.comm.shm.progress import completed
from paceline.comm.shm.region import host_id, rendezvous


class ChainedWork(dist.Work):
    """One such call. It goes on while somebody waits: for it, or for a later one in its line.

    Args:
        line: of calls that go one after the other; this one joins its end.
        legs: what it is made of, begun as they are asked for.
        outputs: its results, once it has ended.
    """

    def __init__(self, line: "deque[ChainedWork]", legs: Iterator[dist.Work], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._line, self._legs, self._outputs = line, legs, outputs
        self._now: dist.Work | None = None
        self._done = False
        self._error: BaseException | None = None
        line.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended.

        Raises:
            RuntimeError: it can't end; or ``timeout`` is up, and then it may be waited for again.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self._done:
            self._line[0]._run(deadline)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        while not self._done and self._line[0]._moves():
            pass
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def result(self) -> list[Tensor]:
        """What it was made for; waits for it."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> "Future[list[Tensor]]":
        """A future that is complete."""
        return completed(self.result())

    def _run(self, deadline: float | None) -> None:
        """One leg of the first in line, to its end."""
        leg = self._leg()
        if leg is None:
            return
        try:
            if deadline is None:
                leg.wait()
            else:
                leg.wait(timedelta(seconds=max(1e-6, deadline - time.monotonic())))
        except Exception as error:
            if not leg.is_completed():
                raise
            self._end(error)
        else:
            self._now = None

    def _moves(self) -> bool:
        """Go on to the next leg, if this one has ended."""
        leg = self._leg()
        if leg is None:
            return True
        if not leg.is_completed():
            return False
        self._run(None)
        return True

    def _leg(self) -> dist.Work | None:
        """The one under way; None: there is none left."""
        try:
            self._now = self._now or next(self._legs, None)
        except Exception as error:
            self._end(error)
            return None
        if self._now is None:
            self._end(None)
        return self._now

    def _end(self, error: BaseException | None) -> None:
        self._done, self._error, self._now = True, error, None
        self._line.popleft()


# mypy: disable-error-code="override"
# torch's stubs give each method several signatures; torch calls the first.


NAME = "hierarchical"


def _by_gloo(name: str) -> Callable[..., dist.Work]:
    """A call that Gloo carries as it is.

    Were it left to torch (2.13), it would be made with Python's lock held, and Gloo's thread, which drops what has
    ended, may wait for that lock while the call waits for that thread.
    """

    def call(group: "Hierarchical", *arguments: Any) -> dist.Work:
        work: dist.Work = getattr(group.gloo, name)(*arguments)
        return work

    return call


class Hierarchical(PythonProcessGroup):
    """Ranks of several hosts.

    Args:
        rank: mine.
        hosts: the ranks of each host.
        inside: the group of my host.
        between: Gloo's of the first rank of each host; None for other ranks.
        gloo: of all ranks.
    """

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], inside: ShmProcessGroup, between: Any | None, gloo: Any
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)))
        self._hosts, self._inside, self._between = hosts, inside, between
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self.gloo, self._line = gloo, deque[ChainedWork]()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Sum up inside, between, and spread inside."""
        rule: Any = opts.reduceOp if opts else dist.ReduceOp.SUM
        return ChainedWork(self._line, self._sums(tensors, rule), tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """As one after the other."""
        return self.allreduce(tensors, opts)

    def _sums(self, tensors: Sequence[Tensor], rule: Any) -> Iterator[dist.Work]:
        mean = rule == dist.ReduceOp.AVG
        inside: Any = ReduceOptions()
        between: Any = AllreduceOptions()
        inside.reduceOp = between.reduceOp = dist.ReduceOp.SUM if mean else rule
        for x in tensors:
            v = vector(x)
            yield self._inside.reduce([v], inside)
            if self._between is not None:
                yield self._between.allreduce([v], between)
            yield self._spread(v)
            if mean:
                v.div_(self.size())
            if not plain(x):
                x.data.copy_(v.view(x.shape))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """To the first of the root's host, from there to those of the others, and inside."""
        return ChainedWork(self._line, self._copies(tensors, opts.rootRank if opts else 0), tensors)

    def _copies(self, tensors: Sequence[Tensor], root: int) -> Iterator[dist.Work]:
        origin = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        between = BroadcastOptions()
        between.rootRank = origin
        for x in tensors:
            v = vector(x)
            if self._host == origin:
                yield self._spread(v, self._hosts[origin].index(root))
            if self._between is not None:
                yield self._between.broadcast([v], between)
            if self._host != origin:
                yield self._spread(v)
            if not plain(x):
                x.data.copy_(v.view(x.shape))

    def barrier(self, opts: Any = None) -> dist.Work:
        """All of a host are there; all hosts are; so tell all."""
        return ChainedWork(self._line, self._meetings(opts), ())

    def _meetings(self, opts: Any) -> Iterator[dist.Work]:
        yield self._inside.barrier(opts)
        if self._between is not None:
            yield self._between.barrier(BarrierOptions())
        yield self._inside.barrier(opts)

    reduce = _by_gloo("reduce")
    allgather = _by_gloo("allgather")
    allgather_coalesced = _by_gloo("allgather_coalesced")
    all_gather_single = _allgather_base = _by_gloo("_allgather_base")
    gather = _by_gloo("gather")
    scatter = _by_gloo("scatter")
    reduce_scatter = _by_gloo("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _by_gloo("_reduce_scatter_base")
    alltoall = _by_gloo("alltoall")
    all_to_all_single = alltoall_base = _by_gloo("alltoall_base")
    send = _by_gloo("send")
    recv = _by_gloo("recv")
    recv_anysource = _by_gloo("recv_anysource")

    def wait_for_ever(self) -> None:
        """Let a wait between hosts last as long as whoever waits wants, from now on."""
        if self._between is not None:
            self._between._set_default_timeout(timedelta(days=30))

    def shutdown(self) -> None:
        """Let go of the memory, and of the connections.

        Gloo's threads end here. One that lets go of a tensor when the interpreter ends takes the whole process with
        it (torch 2.13), and somebody may hold this group until then.
        """
        self._inside.shutdown()
        self.gloo = self._between = None

    def _get_backend(self, _device: Any) -> Any:
        return self.gloo

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def _spread(self, v: Tensor, root: int = 0) -> dist.Work:
        """From one rank of this host to all of it."""
        said = BroadcastOptions()
        said.rootRank = root
        return self._inside.broadcast([v], said)


def create(options: Any, _backend_options: Any) -> Hierarchical:
    """The group that torch.distributed asks for."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group or range(size))
    hosts = _hosts(store, rank, size, timeout)
    mine = next(i for i, members in enumerate(hosts) if rank in members)
    inside = rendezvous(
        PrefixStore(f"inside {mine}", store),
        f"{options.group_id} on one host",
        hosts[mine].index(rank),
        [ranks[member] for member in hosts[mine]],
        timeout.total_seconds(),
    )
    first = rank == hosts[mine][0]
    between = ProcessGroupGloo(PrefixStore("between", store), mine, len(hosts), timeout=timeout) if first else None
    gloo = ProcessGroupGloo(PrefixStore("all", store), rank, size, timeout=timeout)
    return Hierarchical(rank, hosts, ShmProcessGroup(inside, timeout.total_seconds()), between, gloo)


def _hosts(store: Store, rank: int, size: int, timeout: timedelta) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    keys = [f"host of {other}" for other in range(size)]
    store.set(keys[rank], host_id())
    store.wait(keys, timeout)
    names = [store.get(key).decode() for key in keys]
    order = sorted(range(size), key=lambda other: (names.index(names[other]), other))
    return [list(members) for _, members in groupby(order, key=names.__getitem__)]
