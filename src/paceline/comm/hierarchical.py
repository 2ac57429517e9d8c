"""The ``hierarchical`` backend of torch.distributed: shared memory inside each host, Gloo between hosts.

::

    host A          ranks 0 1 2 3 --reduce--> 0 --+              +--> 0 --broadcast--> 0 1 2 3
                    shared memory                 |  all-reduce  |    shared memory
    host B          ranks 4 5 6 7 --reduce--> 4 --+     Gloo     +--> 4 --broadcast--> 4 5 6 7

One rank of each host communicates with other hosts, so a host sends 2·(H−1)/H·|A|·b in an all-reduce over H hosts, for
any number of ranks. All-reduce, broadcast and barrier, which data parallelism needs, go this way; everything else goes
through Gloo as it is.
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

from paceline.comm.shm.collectives import plain, vector
from paceline.comm.shm.process_group import PythonProcessGroup, ShmProcessGroup
from paceline.comm.shm.progress import PythonWork
from paceline.comm.shm.rendezvous import host_id, of_this_start, rendezvous


class ChainedWork(PythonWork):
    """A call of several legs, each started once the one before has ended.

    No thread advances it: it goes on while a caller waits for it, or for a later one in its queue.

    Args:
        queue: calls that run one after the other; this one joins the end.
        legs: starts the next leg when it is advanced.
        outputs: results, once all legs have ended.
    """

    def __init__(self, queue: "deque[ChainedWork]", legs: Iterator[dist.Work], outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._queue, self._legs = queue, legs
        self._current: dist.Work | None = None
        self._done = False
        self._error: BaseException | None = None
        queue.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has ended.

        Raises:
            RuntimeError: a leg failed; or ``timeout`` is up, and then it may be waited for again.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self._done:
            self._queue[0]._advance(deadline)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error; advance it if possible."""
        while not self._done and self._queue[0]._advance(wait=False):
            pass
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _advance(self, deadline: float | None = None, *, wait: bool = True) -> bool:
        """End the leg under way, started if need be; for the first of the queue.

        Args:
            deadline: of the wait for it.
            wait: until it ends; otherwise return False if it has not.
        """
        leg: dist.Work | None = None
        try:
            leg = self._current = self._current or next(self._legs, None)
            if leg is None:
                self._end(None)
            elif not wait and not leg.is_completed():
                return False
            else:
                _wait_for(leg, deadline)
                self._current = None
        except Exception as error:
            if leg is not None and not leg.is_completed():  # the time is up
                raise
            self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        self._done, self._error, self._current = True, error, None
        self._queue.popleft()


def _wait_for(leg: dist.Work, deadline: float | None) -> None:
    """Wait for a leg; raise RuntimeError where it fails, or where the time is up and it has not ended just then."""
    if deadline is not None:
        try:
            leg.wait(timedelta(seconds=max(1e-6, deadline - time.monotonic())))
            return
        except RuntimeError:
            if not leg.is_completed():
                raise
    leg.wait()


# mypy: disable-error-code="override"
# torch's stubs give each method several signatures; torch calls the first.

NAME = "hierarchical"


def _by_gloo(name: str) -> Callable[..., dist.Work]:
    """Return a method that passes a call to Gloo."""

    def call(group: "Hierarchical", *arguments: Any) -> dist.Work:
        # torch (2.13) would make the call with the GIL held, and Gloo's thread, which frees calls that have ended, may
        # wait for the GIL while the call waits for that thread.
        work: dist.Work = getattr(group.gloo, name)(*arguments)
        return work

    return call


class Hierarchical(PythonProcessGroup):
    """The ranks of several hosts.

    Args:
        rank: this one.
        hosts: ranks of each host.
        inside: group of this rank's host.
        between: Gloo's group of the first rank of each host; None on other ranks.
        gloo: Gloo's group of all ranks.
    """

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], inside: ShmProcessGroup, between: Any | None, gloo: Any
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)))
        self._hosts, self._inside, self._between = hosts, inside, between
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self.gloo, self._queue = gloo, deque[ChainedWork]()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce inside each host, all-reduce between hosts, broadcast inside."""
        rule: Any = opts.reduceOp if opts else dist.ReduceOp.SUM
        return ChainedWork(self._queue, self._reductions(tensors, rule), tensors)

    allreduce_coalesced = allreduce

    def _reductions(self, tensors: Sequence[Tensor], rule: Any) -> Iterator[dist.Work]:
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
        """Broadcast to the first rank of the root's host, from it to those of other hosts, and inside."""
        return ChainedWork(self._queue, self._broadcasts(tensors, opts.rootRank if opts else 0), tensors)

    def _broadcasts(self, tensors: Sequence[Tensor], root: int) -> Iterator[dist.Work]:
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
        """Wait inside each host, between hosts, and inside again, which releases all."""
        return ChainedWork(self._queue, self._barriers(opts), ())

    def _barriers(self, opts: Any) -> Iterator[dist.Work]:
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
        """Extend Gloo's own timeout between hosts: from now on the caller's watchdog bounds each wait."""
        if self._between is not None:
            self._between._set_default_timeout(timedelta(days=30))

    def shutdown(self) -> None:
        """Unmap the memory, and close the connections."""
        self._inside.shutdown()
        # This ends Gloo's threads. One that frees a tensor while the interpreter ends aborts the process (torch 2.13),
        # and a user may hold this group until then.
        self.gloo = self._between = None

    def _get_backend(self, _device: Any) -> Any:
        return self.gloo

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def _spread(self, v: Tensor, root: int = 0) -> dist.Work:
        """Broadcast from one rank of this host to the others."""
        options = BroadcastOptions()
        options.rootRank = root
        return self._inside.broadcast([v], options)


def create(options: Any, _backend_options: Any) -> Hierarchical:
    """Create a group, for torch.distributed."""
    store, rank, size, timeout = of_this_start(options.store), options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group or range(size))
    hosts = _hosts(store, rank, size, timeout)
    own = next(i for i, members in enumerate(hosts) if rank in members)
    inside = rendezvous(
        PrefixStore(f"inside {own}", store),
        f"{options.group_id} on one host",
        hosts[own].index(rank),
        [ranks[member] for member in hosts[own]],
        timeout.total_seconds(),
    )
    first = rank == hosts[own][0]
    between = ProcessGroupGloo(PrefixStore("between", store), own, len(hosts), timeout=timeout) if first else None
    gloo = ProcessGroupGloo(PrefixStore("all", store), rank, size, timeout=timeout)
    return Hierarchical(rank, hosts, ShmProcessGroup(inside, timeout.total_seconds()), between, gloo)


def _hosts(store: Store, rank: int, size: int, timeout: timedelta) -> list[list[int]]:
    """Return the ranks of each host; hosts come in the order of their first ranks."""
    keys = [f"host of {other}" for other in range(size)]
    store.set(keys[rank], host_id())
    store.wait(keys, timeout)
    names = [store.get(key).decode() for key in keys]
    order = sorted(range(size), key=lambda other: (names.index(names[other]), other))
    return [list(members) for _, members in groupby(order, key=names.__getitem__)]
