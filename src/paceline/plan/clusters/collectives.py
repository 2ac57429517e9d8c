"""What messages take where it was measured: curves by collective and group, and what follows from them for others.

What was not measured follows from what was, by the bytes that a worker moves::

    moved(all_reduce, n) = 2 (n - 1) / n      moved(broadcast) = moved(send) = 1
    moved(reduce_scatter, n) = moved(all_gather, n) = moved(all_to_all, n) = (n - 1) / n

    t'(bytes) = α · rounds' / rounds + (t(bytes) - α) · moved' / moved        α: of a message without bytes

Source: the bytes of rings are those of nccl-tests' PERFORMANCE.md ("bus bandwidth"). That rounds grow with log2 n is
what fits NCCL on the 8 A100 of a host best, of n - 1, √n, log2 n and none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple, final

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.plan.base import Collective
from paceline.plan.cluster import Group, Messages
from paceline.plan.clusters.knots import Knots


class Measurable(NamedTuple):
    """What has a curve: a collective in a group."""

    collective: Collective
    group: Group

    @property
    def moved(self) -> float:
        """Bytes that each worker sends, of those that :class:`~paceline.plan.base.Call` counts.

        >>> Measurable("all_reduce", Group(4, 4)).moved, Measurable("send", Group(2, 2)).moved
        (1.5, 1.0)
        """
        if self.collective in ("send", "broadcast"):
            return 1.0
        passes = 2 if self.collective == "all_reduce" else 1
        return passes * (self.group.size - 1) / self.group.size

    @property
    def rounds(self) -> float:
        """How latency grows: 2 log2 n for an all_reduce, half of it for what goes one way, 1 for a send."""
        if self.collective == "send":
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * log2(self.group.size)

    def other_than(self, known: "Measurable") -> tuple[bool, float]:
        """How far it is from what is known: another collective first, then the size of the group and of its hosts."""
        larger, denser = (mine / other for mine, other in zip(self.group, known.group, strict=True))
        return self.collective != known.collective, abs(log2(larger)) + abs(log2(denser))


@final
@dataclass(frozen=True)
class Measured(Messages):
    """From what was measured, and from links where nothing was.

    A group on one host follows from the nearest one that was measured on a host, one over several hosts from the
    nearest that was measured over several. Where none was, hosts meet over ``otherwise``, with 1/g of the bytes for
    each of the g workers on a host, after the g have met.

    Args:
        curves: at least one.
        otherwise: what takes the place of curves that there are none of; None: such a group is refused.

    Raises:
        InputError: no curve, or one of a group of a single worker.

    >>> from paceline.plan.clusters.knots import Knot
    >>> pair = Knots((Knot(1e6, 1.1e-3), Knot(2e6, 2.1e-3)))
    >>> messages = Measured({Measurable("all_reduce", Group(2, 2)): pair})
    >>> round(messages.seconds("all_reduce", 1e6, Group(2, 2)), 9), round(messages.seconds("send", 1e6, Group(2, 2)), 9)
    (0.0011, 0.00105)
    """

    curves: Mapping[Measurable, Knots]
    otherwise: Messages | None = None
    _found: dict[Measurable, tuple[Measurable, float, float] | None] = field(
        default_factory=dict[Measurable, tuple[Measurable, float, float] | None], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.curves:
            raise InputError("no curve was measured; write Described(links), or measure one all_reduce.")
        for known in self.curves:
            if known.group.size < 2:
                raise InputError(f"{known}: one worker alone sends nothing; write a group of two or more.")

    def seconds(self, collective: Collective, size_bytes: float, group: Group) -> Seconds:
        if group.size <= 1:
            return 0.0
        asked = Measurable(collective, group)
        if asked not in self._found:
            self._found[asked] = self._follows(asked)
        found = self._found[asked]
        return self._apart(asked, size_bytes) if found is None else self._scaled(found, size_bytes)

    def _follows(self, asked: Measurable) -> tuple[Measurable, float, float] | None:
        """From which curve, and by how much its latency and its bytes grow; None: nothing alike was measured."""
        alike = [known for known in self.curves if (known.group.hosts == 1) == (asked.group.hosts == 1)]
        if not alike:
            return None
        known = min(alike, key=asked.other_than)
        return known, asked.rounds / known.rounds, asked.moved / known.moved

    def _scaled(self, found: tuple[Measurable, float, float], size_bytes: float) -> Seconds:
        known, rounds, moved = found
        curve = self.curves[known]
        if rounds == moved == 1.0:
            return curve.seconds(size_bytes)
        latency_s = min(curve.latency_s, curve.seconds(size_bytes))
        return latency_s * rounds + (curve.seconds(size_bytes) - latency_s) * moved

    def _apart(self, asked: Measurable, size_bytes: float) -> Seconds:
        """Where workers are placed as no measured ones were."""
        collective, group = asked
        if self.otherwise is None:
            place = "one host" if group.hosts == 1 else f"{group.hosts} hosts"
            raise InputError(
                f"nothing was measured on {place}, for {collective} among {group.size}; write "
                "otherwise=Described(Links(…)) with what the links' data sheets say."
            )
        if group.hosts == 1 or group.on_host == 1 or collective in ("send", "broadcast"):
            return self.otherwise.seconds(collective, size_bytes, group)
        return sum(self._in_turn(asked, size_bytes, self.otherwise))

    def _in_turn(self, asked: Measurable, size_bytes: float, between: Messages) -> Iterator[Seconds]:
        """On each host and then between hosts, where one of each host meets the others with its part of the bytes."""
        collective, group = asked
        yield self.seconds(collective, size_bytes, Group(group.on_host, group.on_host))
        yield between.seconds(collective, size_bytes / group.on_host, Group(group.hosts, 1))
