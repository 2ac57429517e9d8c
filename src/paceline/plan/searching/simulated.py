"""A step of a pipeline, as :mod:`paceline.schedule.simulate` has it, but only when it ends.

Where all workers keep a common rhythm it is gone through slot by slot (slots.py), otherwise event by event. Each worker
goes through its schedule's order; an action begins when the worker is free and what it needs is there::

    F of part j     needs F of part j - 1        a message later, if another worker made it
    B, I of part j  needs B or I of part j + 1   likewise, and its own F
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise

from paceline.core.columns import Columns
from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, LayerCost
from paceline.plan.cluster import Cluster
from paceline.plan.division import calls_s
from paceline.plan.habits import Habits
from paceline.plan.searching import slots
from paceline.plan.sizes import mini_batch, shards_of, with_shards
from paceline.schedule import Schedule, parse

Step = tuple[bool, int, int]
"""Of an order: whether it goes forward, the part, the micro-batch; a weight's gradient has part -1 - j."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What each part takes for one micro-batch."""

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    transfer: Seconds = 0.0
    """Of a message from part to part, as far as it is hidden from who sends it."""
    seen: Seconds = 0.0
    """What a message holds up who sends it, after either pass."""

    def quiet(self) -> "Parts":
        """Without messages."""
        return Parts(self.forward, self.backward)

    def held_up(self) -> "Parts":
        """With what is seen of messages as a part of the passes; the first part sends nothing back, the last no on."""
        last = len(self.forward) - 1
        forward = tuple(each + self.seen * (j < last) for j, each in enumerate(self.forward))
        backward = tuple(each + self.seen * (j > 0) for j, each in enumerate(self.backward))
        return Parts(forward, backward, self.transfer)


def parts(
    layers: Sequence[LayerCost], cuts: Sequence[int], arrangement: Arrangement, cluster: Cluster, habits: Habits
) -> Parts:
    """Of layers that are cut so: collectives of shards count where they are, messages as part of who sends them."""
    ends = [0, *cuts, len(layers)]
    cut = [layers[start:end] for start, end in pairwise(ends)]
    each = [with_shards(arrangement, t) for t in shards_of(arrangement)]
    passes = {
        id(layer): _passes_s(layer, each[place % len(each)], cluster)
        for place, part in enumerate(cut)
        for layer in part
    }
    one = message_s([part[-1].output_bytes for part in cut[:-1]], arrangement, cluster)
    hidden = one * habits.send_overlap
    return Parts(
        tuple(sum(passes[id(layer)][0] for layer in part) for part in cut),
        tuple(sum(passes[id(layer)][1] for layer in part) for part in cut),
        hidden,
        one - hidden,
    )


def _passes_s(layer: LayerCost, arrangement: Arrangement, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """Forward and backward, each with its part of what is seen of the collectives."""
    group = cluster.shards(arrangement)
    forward = sum(cluster.messages.of(call, group) for call in layer.forward_calls)
    both = forward + sum(cluster.messages.of(call, group) for call in layer.backward_calls)
    seen = calls_s(layer, cluster, arrangement) / both if both else 0.0
    return layer.forward_s + seen * forward, layer.backward_s + seen * (both - forward)


def message_s(sizes: Sequence[int], arrangement: Arrangement, cluster: Cluster) -> Seconds:
    """The longest between two stages."""
    if not sizes or arrangement.stages == 1:
        return 0.0
    group = cluster.neighbours(arrangement)
    return max(cluster.messages.seconds("send", size, group) for size in set(sizes))


def steps_s(arrangement: Arrangement, each: Sequence[Parts]) -> list[Seconds]:
    """From the first forward to the last backward of a step, one mini-batch after the other, for each of several times
    that parts may take.

    A pipeline of two with equal parts, three micro-batches: (m + p - 1) (F + B):

    >>> steps_s(Arrangement(stages=2, micro_batches=3), [Parts((1.0, 1.0), (2.0, 2.0))])
    [12.0]
    """
    held_up = [parts.held_up() for parts in each]
    if not _in_slots(arrangement):
        return [by_events_s(arrangement, parts) for parts in held_up]
    durations = slots.Durations.of(*((parts.forward, parts.backward, parts.transfer) for parts in held_up))
    return [arrangement.accumulated * float(end_s) for end_s in _by_slots_s(arrangement, durations)]


def _in_slots(arrangement: Arrangement) -> bool:
    """Whether all workers keep a common rhythm: where some take turns they don't."""
    known = arrangement.chunks > 1 or arrangement.schedule in ("gpipe", "1f1b", "zero-bubble")
    return known and max(arrangement.copies, default=1) == 1


def _by_slots_s(arrangement: Arrangement, durations: slots.Durations) -> slots.Real:
    m = mini_batch(arrangement)
    if arrangement.chunks > 1:
        return slots.interleaved_s(durations, arrangement.stages, m)
    if arrangement.schedule == "gpipe":
        return slots.flushed_s(durations, m)
    return slots.alternating_s(durations, m, splits=arrangement.schedule == "zero-bubble")


def by_events_s(arrangement: Arrangement, each: Parts) -> Seconds:
    """Of any schedule, with what is seen of messages in the times already."""
    copies = arrangement.copies or (1,) * arrangement.stages
    orders = _orders(_text(arrangement), copies, mini_batch(arrangement))
    return arrangement.accumulated * Run(orders, each, splits=arrangement.schedule == "zero-bubble").end_s()


def _text(arrangement: Arrangement) -> str:
    return f"interleaved:chunks={arrangement.chunks}" if arrangement.chunks > 1 else arrangement.schedule


@lru_cache(maxsize=64)
def _orders(schedule: str, copies: tuple[int, ...], micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(order) for order in _each(parse(schedule), Columns(copies), micro_batches))


def _each(schedule: Schedule, columns: Columns, micro_batches: int) -> Iterator[Iterator[Step]]:
    for column in columns:
        if len(columns) > len(columns.copies):
            actions = schedule.column(column, columns, micro_batches)
        else:
            actions = schedule.actions(column.stage, len(columns.copies), micro_batches)
        yield (
            (a.kind == "forward", -1 - a.stage if a.kind == "backward_weight" else a.stage, a.micro_batch)
            for a in actions
        )


class Run:
    """Workers go on in turn, each until it has to wait for another."""

    def __init__(self, orders: Sequence[Sequence[Step]], each: Parts, *, splits: bool) -> None:
        count = len(each.forward)
        self._orders, self._hop, self._last = orders, each.transfer, count - 1
        self._forward, self._backward = each.forward, [b / 2 for b in each.backward] if splits else each.backward
        self._went: list[dict[int, Seconds]] = [{} for _ in range(count)]
        self._came: list[dict[int, Seconds]] = [{} for _ in range(count)]
        self._free, self._place = [0.0] * len(orders), [0] * len(orders)

    def end_s(self) -> Seconds:
        """Of all."""
        waiting = list(range(len(self._orders)))
        while waiting:
            waiting = [worker for worker in waiting if self._stopped(worker)]
        return max(self._free)

    def _stopped(self, worker: int) -> bool:
        """Goes on as far as can be; whether there is more to do. One loop without calls: it is all that takes time."""
        went, came, hop, last = self._went, self._came, self._hop, self._last
        forward, backward = self._forward, self._backward
        order, place, now = self._orders[worker], self._place[worker], self._free[worker]
        for ahead, part, i in islice(order, place, None):
            if part < 0:
                now += backward[-1 - part]
            elif ahead:
                there = went[part - 1].get(i) if part else -hop
                if there is None:
                    break
                now = max(now, there + hop) + forward[part]
                went[part][i] = now
            else:
                there = came[part + 1].get(i) if part < last else -hop
                if there is None:
                    break
                now = max(now, there + hop) + backward[part]
                came[part][i] = now
            place += 1
        self._place[worker], self._free[worker] = place, now
        return place < len(order)
