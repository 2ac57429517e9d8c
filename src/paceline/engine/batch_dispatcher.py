"""Which batches a replica's next Δ covers, within the budget.

::

    stream 0   |0|1|2|3|4|...    each replica takes the batches of its own stream, in their order
    stream 1   |0|1|x|3|4|...    x: its replica has died at work on it; others take x, and what the epoch has left of it
    returned    x

A replica takes what belongs to the earliest epoch, so each batch of an epoch is taken once, and before those who could
take it begin the next epoch. Where replicas come and go no stream has an owner: all take from the only one.
"""

from collections.abc import Collection
from typing import Any, Protocol

from paceline.aggregation.base import Aggregation, Portion
from paceline.core.data_order import BatchRange, DataPosition, Outstanding
from paceline.core.types import Clock, ReplicaId
from paceline.engine.budget import StepQuota, Unbounded

# Nothing to compute: the replica's share of the budget is spent.
NO_BATCHES = BatchRange(0, 0, 0)


class Dispatcher(Protocol):
    """Gives batches to replicas, within the budget."""

    @property
    def quota(self) -> StepQuota:
        """Return what each replica may still spend of the budget."""

    def take(
        self, replica: ReplicaId, clock: Clock, portion: Portion | None = None, *, nothing: bool = False
    ) -> BatchRange:
        """Return the batches of a replica's next Δ, its ``clock``-th; none where its share of the budget is spent.

        Args:
            replica: that is to compute.
            clock: number of the Δ.
            portion: that the policy has given it; None: the policy deals out none.
            nothing: whether the replica is to compute no more.
        """

    def settled(self, replica: ReplicaId, clock: Clock) -> None:
        """Note that a Δ was applied, discarded or cancelled."""

    def lost(self, replica: ReplicaId, clock: Clock) -> None:
        """Let others take the batches of a Δ that will never arrive."""

    def abandon(self, replica: ReplicaId) -> None:
        """Let others take what the stream of a replica has left, for it has died."""

    def reclaim(self, replica: ReplicaId) -> None:
        """Give a replica that has come back its stream again, from where the others have left it."""

    @property
    def position(self) -> DataPosition:
        """Return how far the run has come."""


class BatchDispatcher:
    """Gives each replica the batches of its own stream, or of one that all share.

    Args:
        quota: what each replica may spend of the budget.
        position: how far the run has come in its data; what is outstanding there is given to its replica again, or to
            the next one that asks where there is none.
        owners: replicas that have a stream of their own, the one of their number.
        held: batches of Δs that have arrived, and are neither applied nor discarded.
        hands_on: whether replicas take what another one's stream has left; else each counts on its own.
    """

    def __init__(
        self,
        quota: StepQuota,
        position: DataPosition,
        owners: Collection[ReplicaId],
        held: Collection[Outstanding] = (),
        *,
        hands_on: bool = True,
    ) -> None:
        self.quota, self._order = quota, position.order
        self._hands_on = hands_on and self._order is not None
        self._next = list(position.taken)
        """The next batch of each stream."""
        self._open = [stream for stream in range(len(self._next)) if stream not in owners]
        """Streams without an owner."""
        self._owners, self._had_streams = set(owners), frozenset(owners)
        self._reserved: dict[ReplicaId, BatchRange] = {}
        self._returned: list[BatchRange] = []
        self._given: dict[tuple[ReplicaId, Clock], BatchRange] = {}
        """Batches of each Δ that is under way, or held."""
        for batches, replica, clock in held:
            assert replica is not None, "a Δ has a replica"
            self._given[replica, clock] = batches
        for batches, replica, _ in position.outstanding:
            if replica is None or replica in self._reserved:
                self._return(batches)
            else:
                self._reserved[replica] = batches

    def take(
        self, replica: ReplicaId, clock: Clock, portion: Portion | None = None, *, nothing: bool = False
    ) -> BatchRange:
        del portion
        if nothing:
            return NO_BATCHES
        if (reserved := self._reserved.pop(replica, None)) is not None:
            batches = self._split(reserved)
        elif self._returned or self._open:
            batches = self._earliest(replica)
        else:
            batches = BatchRange(replica, self._next[replica], self.quota.micro_steps)
            self._next[replica] += batches.size
        allowed = self.quota.grant(replica, batches)
        if allowed < batches.size:
            stream, first, count = batches
            self._put_back(BatchRange(stream, first + allowed, count - allowed))
            if not allowed:
                return NO_BATCHES
            batches = BatchRange(stream, first, allowed)
        self._given[replica, clock] = batches
        return batches

    def settled(self, replica: ReplicaId, clock: Clock) -> None:
        """Note that a Δ was applied, discarded or cancelled."""
        self._given.pop((replica, clock), None)

    def lost(self, replica: ReplicaId, clock: Clock) -> None:
        """Let others take the batches of a Δ that will never arrive."""
        batches = self._given.pop((replica, clock))
        self.quota.refund(batches)
        self._put_back(batches)

    def abandon(self, replica: ReplicaId) -> None:
        """Let others take what the stream of a replica has left, for it has died."""
        if replica in self._owners and self._hands_on:
            self._owners.remove(replica)
            self._open.append(replica)
        if (batches := self._reserved.pop(replica, None)) is not None:
            self._return(batches)

    def reclaim(self, replica: ReplicaId) -> None:
        """Give a replica that has come back its stream again, from where the others have left it."""
        if self._hands_on and replica in self._had_streams:
            self._owners.add(replica)
            self._open = [stream for stream in self._open if stream != replica]

    @property
    def position(self) -> DataPosition:
        """Return how far the run has come."""
        given = [Outstanding(batches, *name) for name, batches in self._given.items()]
        waiting = [Outstanding(batches, replica, 0) for replica, batches in self._reserved.items()]
        returned = [Outstanding(batches, None, 0) for batches in self._returned]
        return DataPosition(self._order, tuple(self._next), (*given, *waiting, *returned))

    def _earliest(self, replica: ReplicaId) -> BatchRange:
        """Return what belongs to the earliest epoch; of one epoch, the replica's own stream comes first."""
        count, order = self.quota.micro_steps, self._order
        assert order is not None, "without an order nothing is handed on"
        if not self._returned and len(self._next) == 1:  # the usual case of a stream that all share
            candidates = [(0, True, BatchRange(0, self._next[0], count))]
        else:
            streams = [*self._open, *([replica] if replica in self._owners else [])]
            heads = [BatchRange(stream, self._next_with_samples(stream, replica), count) for stream in streams]
            own_stream = replica if replica in self._owners else None
            candidates = [
                (order.epoch_of(b.stream, b.first), b.stream != own_stream, b) for b in (*heads, *self._returned)
            ]
        _, _, batches = min(candidates)
        if batches in self._returned:
            self._returned.remove(batches)
            return self._split(batches)
        self._next[batches.stream] = batches.first + count
        return batches

    def _next_with_samples(self, stream: ReplicaId, replica: ReplicaId) -> int:
        """Return the next batch of a stream; one without samples concerns its owner alone, whom others wait for."""
        assert self._order is not None, "the data have no order"
        while stream != replica and not self._order.size(stream, self._next[stream]):
            self._next[stream] += 1
        return self._next[stream]

    def _split(self, batches: BatchRange) -> BatchRange:
        """Return as many of some batches as one Δ takes; the others may be taken by anybody."""
        (stream, first, count), most = batches, self.quota.micro_steps
        if count > most:
            self._return(BatchRange(stream, first + most, count - most))
        return BatchRange(stream, first, min(count, most))

    def _return(self, batches: BatchRange) -> None:
        if self._hands_on:
            self._returned.append(batches)

    def _put_back(self, batches: BatchRange) -> None:
        if batches.first + batches.size == self._next[batches.stream]:
            self._next[batches.stream] = batches.first
        elif batches.size:
            self._return(batches)


class PortionDispatcher:
    """Gives replicas the portions that the policy says; all of a batch is in the budget, or none.

    ::

        stream 0   |0|1|2|...    one portion of each batch; number k of all streams together is batch k, as a round of
        stream 1   |0|1|2|...    as many replicas would be
        stream 2   |0|1|2|...

    Where a run goes on it begins with the first batch that was not applied: which replica has computed what of it makes
    no difference.

    Args:
        budget: of each stream, as if a replica computed it.
        position: how far the run has come in its data.
    """

    def __init__(self, budget: StepQuota, position: DataPosition) -> None:
        self._budget, self._order, self._streams = budget, position.order, len(position.taken)
        self.quota = Unbounded(budget.micro_steps)
        """No replica has a share of the budget of its own."""
        self._first = min([*position.taken, *(each.batches.first for each in position.outstanding)])
        """Number in each stream of the portions of the policy's batch 0."""
        self._newest = 0
        """The policy's newest batch."""
        self._granted: dict[int, bool] = {}
        """Whether that is in the budget."""

    def take(
        self, replica: ReplicaId, clock: Clock, portion: Portion | None = None, *, nothing: bool = False
    ) -> BatchRange:
        del replica, clock
        assert portion is not None, "the policy deals out portions"
        first, size = self._first + portion.batch * self.quota.micro_steps, self.quota.micro_steps
        if portion.batch not in self._granted:
            grants = [self._budget.grant(stream, BatchRange(stream, first, size)) for stream in range(self._streams)]
            self._newest, self._granted = portion.batch, {portion.batch: any(grants)}
        granted = self._granted[portion.batch] and not nothing
        return BatchRange(portion.number, first, size) if granted else NO_BATCHES

    def settled(self, replica: ReplicaId, clock: Clock) -> None:
        """Do nothing, as the next ones: the policy gives a portion to others where that is needed."""

    def lost(self, replica: ReplicaId, clock: Clock) -> None:
        """Do nothing."""

    def abandon(self, replica: ReplicaId) -> None:
        """Do nothing."""

    def reclaim(self, replica: ReplicaId) -> None:
        """Do nothing."""

    @property
    def position(self) -> DataPosition:
        taken = self._first + self._newest * self.quota.micro_steps
        return DataPosition(self._order, (taken,) * self._streams)


def dispatcher_of(policy: Aggregation[Any], replicas: int, quota: StepQuota) -> Dispatcher:
    """Return the dispatcher of a run without data, in which each replica, or portion, counts its own batches."""
    if policy.portions is not None:
        return PortionDispatcher(quota, DataPosition(None, (0,) * policy.portions))
    return BatchDispatcher(quota, DataPosition(None, (0,) * replicas), range(replicas))
