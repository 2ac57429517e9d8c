"""The common part of all pictures of spans: lanes, the time window shown, and labels of times."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds, Seconds
from paceline.trace.spans import ACTIONS, SERVER, Action, Span

_UNITS: tuple[tuple[int, str], ...] = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"), (1, "ns"))


class Look(NamedTuple):
    """Look of an action: its character in a line of text, and its colour in an SVG."""

    letter: str
    colour: str


# Blue and orange, as far apart as colours get for those who see few of them (after Okabe and Ito, 2008): shades of one
# hue belong together, what is no work is pale.
LOOKS: dict[Action, Look] = {
    "compute": Look("C", "#4464ad"),
    "forward": Look("F", "#2f7fc1"),
    "backward": Look("B", "#e58a1f"),
    "backward_input": Look("I", "#c8651b"),
    "backward_weight": Look("W", "#f3b765"),
    "recompute": Look("R", "#8fc3e8"),
    "send": Look("s", "#b183b8"),
    "receive": Look("r", "#d3b3d8"),
    "all_reduce": Look("=", "#7b4f8c"),
    "pull": Look("v", "#7cc5ad"),
    "push": Look("^", "#27937a"),
    "apply": Look("A", "#33415c"),
    "wait": Look(".", "#e2e2e2"),
    "delay": Look("~", "url(#paceline-delay)"),
    "evaluate": Look("E", "#e3cf3a"),
}


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
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        workers.setdefault((span.replica, span.stage, span.shard), []).append(span)
    # Stage and shard are part of a label if any worker of its kind, replicas or servers, has others than 0.
    split = {replica == SERVER for replica, *place in workers if place != [0, 0]}
    result: list[Lane] = []
    for replica, stage, shard in sorted(workers, key=lambda worker: (worker[0] == SERVER, worker)):
        server = replica == SERVER
        label = "server" if server else f"replica {replica}"
        if server in split:
            label += f"{' ' if server else '.'}{stage}.{shard}"
        result.append(Lane(label, server, tuple(workers[replica, stage, shard])))
    return result


def window_lanes(
    spans: Sequence[Span], start_s: Seconds | None, end_s: Seconds | None
) -> tuple[Stretch, list[Lane], list[Action]]:
    """Return a time window of a run as of :func:`stretch`, the lanes, and the actions that they show in it."""
    shown, drawn = stretch(spans, start_s, end_s), lanes(spans)
    return shown, drawn, present(drawn, shown)


@dataclass(frozen=True)
class Panel:
    """One step of a pipeline."""

    title: str
    spans: Sequence[Span]
    """Spans of one replica, whose times begin with 0."""
    length_ns: Nanoseconds

    def lanes(self) -> list[Lane]:
        """Return one for each worker, labelled by its stage."""
        split = any(span.shard for span in self.spans)
        workers = [(lane, lane.spans[0]) for lane in lanes(self.spans)]
        return [
            Lane(f"stage {first.stage}{f'.{first.shard}' if split else ''}", lane.server, lane.spans)
            for lane, first in workers
        ]


def panel_lanes(panels: Iterable[Panel]) -> tuple[Stretch, list[list[Lane]], list[Action]]:
    """Return the time window that holds all panels, the lanes of each, and the actions that they show."""
    panels = list(panels)
    shown, rows = Stretch(0, 0, max(1, *(panel.length_ns for panel in panels))), [panel.lanes() for panel in panels]
    return shown, rows, present(chain.from_iterable(rows), shown)


def present(all_lanes: Iterable[Lane], shown: Stretch) -> list[Action]:
    """Return the actions that a stretch shows, in the order of legends."""
    actions = {span.action for lane in all_lanes for span in lane.spans if shown.cut(span)}
    return [action for action in ACTIONS if action in actions]


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
    # The unit suits the last label; all labels of an axis share it, and as many decimals as the step needs.
    scale, unit = next((each for each in _UNITS if shown.end_ns >= each[0]), _UNITS[-1])
    decimals = max(0, math.ceil(math.log10(scale / step)))
    for at in range(-(-shown.start_ns // step) * step, shown.end_ns + 1, step):
        yield at - shown.start_ns, f"{at / scale:.{decimals}f} {unit}"
