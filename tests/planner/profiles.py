"""A profile by hand, of round numbers: four units, the third and the first of which share a weight."""

from dataclasses import replace

from paceline.planner.base import Arrangement, Numerics
from paceline.planner.program.profile import (
    Busy,
    LineFit,
    Pieces,
    PipelinePart,
    Point,
    Profile,
    Sent,
    ShortRun,
    Unit,
    UnitSharding,
    this_machine,
)

UNITS = (
    Unit("words", 100, LineFit(), LineFit(0.0, 40.0), "weight"),
    Unit("middle", 20, LineFit(8.0, 40.0), LineFit(0.0, 40.0)),
    Unit("head", 100, LineFit(0.0, 40.0), LineFit(0.0, 80.0), "weight"),
    Unit("loss", 0, LineFit(0.0, 80.0), LineFit()),
)

FORWARD = (LineFit(1e-3, 1e-4), LineFit(1e-3, 2e-4), LineFit(1e-3, 1e-4), LineFit(1e-3, 0.0))

HALVES = UnitSharding(
    2,
    (
        PipelinePart(1.0, 100, 1.0),
        PipelinePart(0.5, 10, 0.5, backward=(Sent("all_reduce", LineFit(0.0, 40.0)),)),
        PipelinePart(0.5, 50, 1.0, forward=(Sent("all_gather", LineFit(16.0, 80.0)),)),
        PipelinePart(),
    ),
    once=(Sent("all_reduce", LineFit(800.0, 0.0)),),
)


def busy(workers: int, slower: float = 1.0) -> Busy:
    """Backward takes twice as long as forward."""
    forward = tuple(line.times(slower) for line in FORWARD)
    return Busy(workers, max(1, 2 // workers), forward, tuple(line.times(2.0) for line in forward), 0.9, 1.2)


def points(collective: str, seconds: float) -> tuple[Point, ...]:
    """α + bytes / β, with β 1 GB/s."""
    return tuple(Point(collective, 2, size, seconds + size * 1e-9) for size in (1024, 2**20))  # type: ignore[arg-type]


def run(arrangement: Arrangement, step_s: float, beside_bytes: float) -> ShortRun:
    """Closed forms say 5 ms, 4 of them computing; its pieces are 6 ms of computing, 1 of copies, 2 of an update."""
    return ShortRun(arrangement, step_s, Pieces(6e-3, 1e-3, 2e-3, 0.9, 1.2), 5e-3, 4e-3, beside_bytes)


RUNS = {
    "alone": run(Arrangement(micro_batch=8), 9.1e-3, 1100.0),
    "replicas": run(Arrangement(2, micro_batch=7), 9.2e-3, 2200.0),
    "stages": run(Arrangement(stages=2, micro_batch=3, micro_batches=2), 9.3e-3, 3300.0),
    "shards": run(Arrangement(shards=2, micro_batch=7), 8.6e-3, 4400.0),
}
"""The second and the fourth of batches that no plan has, so that none is one of them."""

PROFILE = Profile(
    "by hand",
    this_machine(),
    UNITS,
    (busy(1), busy(2, 1.5)),
    (HALVES, UnitSharding(3, refused="nothing can be divided into 3")),
    "",
    (*points("all_reduce", 1e-4), *points("all_gather", 1e-4), *points("send", 5e-5)),
    Numerics(4, 4, 8),
    1e-6,
    500,
    600.0,
    1e9,
    120,
    8,
    RUNS,
    {"compute": "by hand"},
)


def uncut() -> Profile:
    """Of a model that can't be captured."""
    unit = Unit("the whole model", 120, LineFit(), LineFit())
    one = tuple(replace(each, forward=each.forward[:1], backward=each.backward[:1]) for each in PROFILE.busy)
    return replace(PROFILE, units=(unit,), busy=one, divisions=(), uncut="it branches on values")
