"""The common part of all pictures of spans: lanes, the time window shown, and labels of times."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.spans import ACTIONS, SERVER, Action, Span

_UNITS: tuple[tuple[int, str], ...] = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's spans, by their start."""

    label: str
    server: bool
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time that is shown, in nanoseconds since the first span of the run, which began at ``origin_ns``."""

    origin_ns: Nanoseconds
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    @property
    def length_ns(self) -> Nanoseconds:
        """Return how much time is shown; never 0."""
        return self.end_ns - self.start_ns

    def cut(self, span: Span) -> tuple[Nanoseconds, Nanoseconds] | None:
        """Return start and end of a span since the start of the stretch, cut to it; None if it is outside."""
        start = max(span.start_ns - self.origin_ns, self.start_ns)
        end = min(span.end_ns - self.origin_ns, self.end_ns)
        if end < start or (end == start and span.duration_ns > 0):
            return None
        return start - self.start_ns, end - self.start_ns


def stretch(spans: Sequence[Span], start_s: Seconds | None = None, end_s: Seconds | None = None) -> Stretch:
    """Return the stretch from ``start_s`` to ``end_s``, in seconds since the first span; by default the whole run.

    Raises:
        InputError: the stretch is empty or does not meet the run.
    """
    origin = min(span.start_ns for span in spans)
    last = max(span.end_ns for span in spans) - origin
    start = 0 if start_s is None else round(start_s * 1e9)
    end = max(last, start + 1) if end_s is None else round(end_s * 1e9)
    if start >= end or start > last or end < 0:
        raise InputError(
            f"the stretch from {start / 1e9:g} s to {end / 1e9:g} s shows nothing of a run of {last / 1e9:g} s; "
            f"write a start and an end between 0 and {last / 1e9:g}."
        )
    return Stretch(origin, start, end)


def lanes(spans: Iterable[Span]) -> list[Lane]:
    """Return one lane per worker, by replica, stage and shard; the server's last."""
    workers: dict[tuple[int, int, int], list[Span]] = {}
    for span in spans:
        workers.setdefault((span.replica, span.stage, span.shard), []).append(span)
    order = sorted(workers, key=lambda worker: (worker[0] == SERVER, worker))
    split = {server: any(w[1:] != (0, 0) for w in order if (w[0] == SERVER) is server) for server in (False, True)}

    def label(worker: tuple[int, int, int]) -> str:
        name = "server" if worker[0] == SERVER else f"replica {worker[0]}"
        if not split[worker[0] == SERVER]:
            return name
        return f"{name}{' ' if worker[0] == SERVER else '.'}{worker[1]}.{worker[2]}"

    return [
        Lane(
            label(worker),
            worker[0] == SERVER,
            tuple(sorted(workers[worker], key=lambda span: (span.start_ns, span.end_ns))),
        )
        for worker in order
    ]


def present(all_lanes: Iterable[Lane], shown: Stretch) -> list[Action]:
    """Return the actions that a stretch shows, in the order of legends."""
    found = {span.action for lane in all_lanes for span in lane.spans if shown.cut(span)}
    return [action for action in ACTIONS if action in found]


def dominant(totals: dict[Action, Nanoseconds]) -> Action:
    """Return the action with the most time; of equal ones the first of the legend."""
    return min(totals, key=lambda action: (-totals[action], ACTIONS.index(action)))


def duration(nanoseconds: float) -> str:
    """Return a duration with three digits and the unit that suits it.

    >>> duration(1_250_000), duration(90_000_000_000)
    ('1.25 ms', '90 s')
    """
    scale, unit = next((each for each in _UNITS if nanoseconds >= each[0]), _UNITS[-1])
    value = nanoseconds / scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def ticks(shown: Stretch, count: int) -> Iterator[tuple[Nanoseconds, str]]:
    """Yield about ``count`` round times in a stretch, since its start, with their labels.

    >>> list(ticks(Stretch(0, 0, 20_000_000), 4))
    [(0, '0 ms'), (5000000, '5 ms'), (10000000, '10 ms'), (15000000, '15 ms'), (20000000, '20 ms')]
    """
    # The round step, 1, 2 or 5 times a power of ten, that is nearest by ratio.
    rough = max(1.0, shown.length_ns / count)
    power = 10 ** math.floor(math.log10(rough))
    step = min((power * digit for digit in (1, 2, 5, 10)), key=lambda each: abs(math.log(each / rough)))
    scale, unit = next((each for each in _UNITS if shown.end_ns >= each[0]), _UNITS[-1])
    decimals = max(0, math.ceil(math.log10(scale / step)))
    for at in range(-(-shown.start_ns // step) * step, shown.end_ns + 1, step):
        yield at - shown.start_ns, f"{at / scale:.{decimals}f} {unit}"
