"""Do real workers agree with virtual time, given what was measured of them? Smooth Switch against asynchronous."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isnan
from statistics import fmean
from typing import cast

from assumptions import Assumptions
from cells import METRICS, Cell, Result, Store, run
from protocol import TABLES
from server_time import ENGINES, Server
from sheets import Row
from study import COMPARED
from tables import BASELINE, SWITCH, paired

from paceline.api.train import open_engine
from paceline.clock.distributions import show
from paceline.core.types import Seconds
from paceline.engine.base import Engine, Job, Outcome, Watcher
from paceline.trace.spans import Span

COMBINES = ("sum", "mean")

CONFIGURATION = TABLES[4].configurations[2]
"""The step size that the paper recommends, 5/lr, on random data."""

SHEET = "engines.csv"

SECONDS: Seconds = 20.0
ROUNDS = 3

Key = tuple[str, str]
"""(engine, combine)."""


@dataclass(frozen=True)
class Steps:
    """What workers recorded where none waits for another: seconds of a step, averaged over all of them.

    ::

        worker   |- delay -|-- compute --|- push -|.......... wait ..........|- pull -|
        server                                  (on its way)|- queue -|- update -|(on its way)
                                         |<------------------ left ------------------>|

    A step's parts hold what other workers, the server and other programs took of the cores meanwhile.
    """

    compute_s: Seconds
    """Forward and backward."""
    handling_s: Seconds
    """Push and pull, at the worker's end."""
    left_s: Seconds
    """All beside compute and delay."""
    rate: float
    """Gradients a second, of all workers."""

    def bound(self, server: Server) -> Server:
        """The line as it can have been in this run: no server handles more gradients than its time allows.

        Other programs may have had more of the cores when the line was measured; then all of it is too long.
        """
        share = min(1.0, 1 / (self.rate * server.period_s(1)))
        return Server(share * server.apply_s, share * server.gradient_s)

    def transfer_s(self, server: Server) -> Seconds:
        """One way between worker and server: half of what is left without the queue and the update.

        Where the server is busy all the time, what is left is queue but for push and pull.
        """
        return max(self.handling_s, self.left_s - at_server_s(server, self.rate)) / 2

    def times(self, server: Server) -> str:
        """For virtual time."""
        return (
            f"compute={show(self.compute_s)} transfer={show(self.transfer_s(server))} "
            f"apply={show(server.apply_s)} gradient={show(server.gradient_s)}"
        )


def at_server_s(server: Server, rate: float) -> Seconds:
    """Queue and update of a lone gradient where so many come in a second: Pollaczek and Khinchine's, service constant.

    >>> at_server_s(Server(apply_s=0.5, gradient_s=0.5), rate=0.5), at_server_s(Server(0.5, 0.5), rate=1.0)
    (1.5, inf)
    """
    update_s = server.period_s(1)
    busy = rate * update_s
    return update_s * (1 + busy / (2 * (1 - busy))) if busy < 1 else inf


@dataclass(frozen=True)
class Round:
    """Both algorithms once, on real workers and in virtual time."""

    engine: str
    combine: str
    steps: Steps
    """Of the asynchronous run."""
    server: Server
    """As it can have been in that run."""
    apply_s: Seconds
    """The arithmetic of an update alone, by the server's own spans in that run."""
    real: Mapping[str, Result]
    """By algorithm."""
    cells: Mapping[str, Cell]
    """The same in virtual time."""


@dataclass(frozen=True)
class Agreement:
    """One metric's difference, Smooth Switch minus asynchronous: mean, and half of its 95 % interval."""

    metric: str
    real: tuple[float, float]
    virtual: tuple[float, float]

    @property
    def verdict(self) -> str:
        """``agree`` or ``disagree`` in sign; ``unclear`` where an interval contains 0, or there is none."""
        if not (_clear(self.real) and _clear(self.virtual)):
            return "unclear"
        return "agree" if (self.real[0] > 0) == (self.virtual[0] > 0) else "disagree"


def _clear(difference: tuple[float, float]) -> bool:
    mean, half_width = difference
    return not isnan(half_width) and abs(mean) > half_width


class Traced(Engine):
    """Another engine that records spans, whatever it is asked.

    Args:
        inner: stays open when this one is closed.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner, self.name = inner, inner.name
        self.spans: Sequence[Span] = ()
        """Of the last run."""

    def refuse(self, job: Job) -> None:
        self._inner.refuse(job)

    def run(self, job: Job, watch: Watcher) -> Outcome:
        self.spans = ()
        outcome = self._inner.run(replace(job, trace=True), watch)
        self.spans = outcome.spans
        return outcome


def steps_of(spans: Sequence[Span], seconds: Seconds) -> Steps:
    """The mean step of the workers behind these spans.

    Args:
        spans: of a run in which no worker waits for another.
        seconds: its length.
    """
    workers = [span for span in spans if span.replica >= 0]
    total, count = _sums(workers)
    made, compute = count["backward"], total["forward"] + total["backward"]
    left = sum(_lives(workers)) - compute - total["delay"]
    return Steps(compute / made, (total["pull"] + total["push"]) / made, left / made, made / seconds)


def _lives(spans: Iterable[Span]) -> Iterator[Seconds]:
    """From each worker's first span to the end of its last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for span in spans:
        first[span.replica] = min(first.get(span.replica, span.start_ns), span.start_ns)
        last[span.replica] = max(last.get(span.replica, span.end_ns), span.end_ns)
    return ((last[replica] - first[replica]) * 1e-9 for replica in first)


def apply_s(spans: Iterable[Span]) -> Seconds:
    """The mean time of an update's arithmetic."""
    total, count = _sums(span for span in spans if span.action == "apply")
    return total["apply"] / count["apply"]


def _sums(spans: Iterable[Span]) -> tuple[dict[str, Seconds], dict[str, int]]:
    total: defaultdict[str, Seconds] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        total[span.action] += span.duration_ns * 1e-9
        count[span.action] += 1
    return total, count


def real_rounds(servers: Mapping[str, Server], rounds: int = ROUNDS, seconds: Seconds = SECONDS) -> Iterator[Round]:
    """Both algorithms under both ways to combine, turn by turn; every second round in the other order."""
    for name in ENGINES:
        with open_engine(name) as opened:
            engine = Traced(opened)
            for number, combine in product(range(rounds), COMBINES):
                yield _round(engine, combine, number, seconds, servers[name])


def _round(engine: Traced, combine: str, number: int, seconds: Seconds, server: Server) -> Round:
    cells = _cells(combine, number, seconds)
    real: dict[str, Result] = {}
    spans: dict[str, Sequence[Span]] = {}
    for name in COMPARED[:: -1 if number % 2 else 1]:
        real[name] = run(replace(cells[name], engine=cast(str, engine), times=""), {})
        spans[name] = engine.spans
    steps = steps_of(spans[BASELINE], seconds)
    there = steps.bound(server)
    virtual = {name: replace(cell, times=steps.times(there)) for name, cell in cells.items()}
    return Round(engine.name, combine, steps, there, apply_s(spans[BASELINE]), real, virtual)


def _cells(combine: str, number: int, seconds: Seconds) -> dict[str, Cell]:
    assumed = Assumptions(combine=combine)
    policies = CONFIGURATION.policies(assumed)
    return {
        name: replace(CONFIGURATION.cell(policies[name], number, assumed, 0.0), seconds=seconds) for name in COMPARED
    }


def by_key(rounds: Iterable[Round]) -> dict[Key, list[Round]]:
    """The rounds of each engine and way to combine."""
    found: defaultdict[Key, list[Round]] = defaultdict(list)
    for one in rounds:
        found[one.engine, one.combine].append(one)
    return dict(found)


def agreements(rounds: Sequence[Round], store: Store) -> list[Agreement]:
    """A metric each; the runs in virtual time have been made."""
    virtual = [{name: store[cell] for name, cell in one.cells.items()} for one in rounds]
    real = [one.real for one in rounds]
    return [Agreement(metric, difference(metric, real), difference(metric, virtual)) for metric in METRICS]


def difference(metric: str, rounds: Sequence[Mapping[str, Result]]) -> tuple[float, float]:
    """Smooth Switch minus asynchronous, paired by round."""
    return paired([getattr(one[SWITCH], metric) - getattr(one[BASELINE], metric) for one in rounds])


def rows(rounds: Iterable[Round], store: Store) -> Iterator[Row]:
    """For the CSV file: an engine, a way to combine and a metric each."""
    for (engine, combine), those in by_key(rounds).items():
        rest = _counts(those, store) | _times(those)
        for found in agreements(those, store):
            yield {"engine": engine, "combine": combine} | _row(found) | rest


def _row(found: Agreement) -> Row:
    numbers = {
        "real": found.real[0],
        "real_half_width": found.real[1],
        "virtual": found.virtual[0],
        "virtual_half_width": found.virtual[1],
    }
    return {"metric": found.metric} | {n: f"{v:.6g}" for n, v in numbers.items()} | {"verdict": found.verdict}


def _counts(rounds: Sequence[Round], store: Store) -> Row:
    counted: Row = {}
    for name in COMPARED:
        key = name.replace("-", "_")
        counted[f"{key}_gradients_real"] = round(fmean(one.real[name].gradients for one in rounds))
        counted[f"{key}_gradients_virtual"] = round(fmean(store[one.cells[name]].gradients for one in rounds))
    return counted


def _times(rounds: Sequence[Round]) -> Row:
    found = {
        "compute_s": fmean(one.steps.compute_s for one in rounds),
        "transfer_s": fmean(one.steps.transfer_s(one.server) for one in rounds),
        "handling_s": fmean(one.steps.handling_s for one in rounds),
        "left_s": fmean(one.steps.left_s for one in rounds),
        "apply_span_s": fmean(one.apply_s for one in rounds),
        "apply_s": fmean(one.server.apply_s for one in rounds),
        "gradient_s": fmean(one.server.gradient_s for one in rounds),
        "seconds": next(iter(rounds[0].cells.values())).seconds,
    }
    return {name: f"{value:.6g}" for name, value in found.items()} | {"rounds": len(rounds)}
