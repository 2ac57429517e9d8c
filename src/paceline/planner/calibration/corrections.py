"""Published rows counted layer by layer, and the few numbers that a calibration finds from them.

The few numbers that a calibration finds, each with what it is expected to be before any row is seen.

All are above 0 and stand as factors of what is expected: 1 says that nothing was learnt. They act where costs are
computed (blocks.py, cost.py), never on what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import exp

from paceline.planner.base import Arrangement, Cost, Numerics, OverlapModel, Recomputed
from paceline.planner.calibration import row_shapes
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.cluster import Cluster, Described, Links
from paceline.planner.cost import cost
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape
from paceline.planner.shapes.shape_file import DescribedWorkload
from paceline.planner.stage_division import StageDivision, stages_of


@dataclass(frozen=True)
class Case:
    """A row that can be counted layer by layer."""

    row: PublishedRow
    shape: Shape
    arrangement: Arrangement
    cluster: Cluster
    numerics: Numerics
    kernels: DeviceEfficiency
    """As expected of its device."""
    newer: bool

    @classmethod
    def of(cls, row: PublishedRow) -> "Case | None":
        """None: there is no shape."""
        found = row_shapes.shape(row)
        return None if found is None else _settled(row, found)

    @property
    def workload(self) -> DescribedWorkload:
        """Of it, as expected of its device."""
        told = row_shapes.precision(self.row)
        return DescribedWorkload(self.shape, self.cluster.device, 1, told, kernels=self.kernels, held_as=self.numerics)

    @property
    def cuts(self) -> tuple[int, ...]:
        """As many blocks on each stage, the embedding on the first and the head on the last."""
        parts = self.arrangement.stages * self.arrangement.chunks
        return tuple(1 + round(part * self.shape.layers / parts) for part in range(1, parts))

    def cost(self, workload: DescribedWorkload, cluster: Cluster, overlap_model: OverlapModel) -> Cost:
        """Of a step."""
        layers = workload.layers(self.arrangement)
        row = stages_of(layers, self.cuts, self.arrangement, cluster)
        return cost(workload, cluster, self.arrangement, overlap_model, StageDivision(layers, self.cuts, row))


def _settled(row: PublishedRow, shape: Shape) -> Case:
    """With what the row leaves open: the first that fits, or the last."""
    found = row_shapes.arrangement(row)
    where, divided = row_shapes.cluster(row, found.workers), _levels(row, found.divided)
    again: tuple[Recomputed, ...] = (found.recompute,) if _told(row) or row_shapes.newer(row) else ("none", "full")
    for recompute, samples, level in product(again, _samples(row, found), divided):
        many = max(1, round(found.samples / found.replicas / samples))
        tried = replace(found, divided=level, recompute=recompute, micro_batch=samples, micro_batches=many)
        case = Case(
            row, shape, tried, where, row_shapes.numerics(row, tried), row_shapes.kernels(row), row_shapes.newer(row)
        )
        if case.cost(case.workload, where, OverlapModel()).peak.total < _FILLED * where.device.memory_bytes:
            break
    return case


def _levels(row: PublishedRow, told: int) -> tuple[int, ...]:
    """What may be divided among replicas: Megatron-Core's distributed optimizer is often written down as none."""
    if not row.text("zero"):
        return (0, 1, 3)
    if told == 3 and row_shapes.keeps_whole(row):
        return (1,)
    return (0, 1) if told == 0 and row_shapes.newer(row) else (told,)


def _samples(row: PublishedRow, found: Arrangement) -> tuple[float, ...]:
    """Of a micro-batch, where a row does not tell: as many as fit, but no more than are likely."""
    if row.text("mbs") or not row.text("gbs"):
        return (found.micro_batch,)
    return tuple(samples for samples in (4.0, 2.0, 1.0) if samples <= found.micro_batch) or (found.micro_batch,)


_FILLED = 0.9
"""Of a device's memory: the rest is the runtime's."""


def _told(row: PublishedRow) -> bool:
    """Whether a row says what is computed again, if only that it is not all: ``unknown (selective/none)``."""
    text = row.text("recompute")
    return bool(text) and (not text.startswith("unknown") or "none" in text)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors of what is expected, ten of them.

    >>> Corrections.of([0.0] * 10) == Corrections()
    True
    """

    products: float = 1.0
    """Of the data sheet's operations that matrix products get."""
    bytes: float = 1.0
    """Of memory's bandwidth that the rest gets."""
    host: float = 1.0
    """Of what a host takes to start a kernel."""
    call: float = 1.0
    """Of what hosts wait for each other at a collective of shards."""
    inside: float = 1.0
    """Of bandwidth inside hosts."""
    between: float = 1.0
    """Of bandwidth between hosts."""
    overlap: float = 1.0
    """Of the part of computing that gathering divided parameters hides in."""
    micro_batch: float = 1.0
    """Of what a micro-batch takes beside all else."""
    step: float = 1.0
    """Of what a step takes beside all else."""
    scores: float = 1.0
    """Of what attention that is fused gets of the rate of products."""

    @classmethod
    def names(cls) -> list[str]:
        """Of each, in order."""
        return [each.name for each in fields(cls)]

    @classmethod
    def of(cls, deviations: Sequence[float]) -> "Corrections":
        """From how many standard deviations each is off what is expected, in logarithms."""
        return cls(*(exp(spread * each) for spread, each in zip(SPREADS, deviations, strict=True)))


SPREADS = (0.08, 0.3, 0.5, 0.5, 0.15, 0.3, 0.2, 0.4, 0.4, 0.4)
"""Of the logarithm of each: what is expected of a device is known better than what a framework adds."""

EXPECTED_HABITS = OverlapModel(overlap=0.7, step_s=5e-3, micro_batch_s=2e-3)
EXPECTED_INSIDE, EXPECTED_BETWEEN = 0.8, 0.7
LATENCY_S, BETWEEN_LATENCY_S = 1.5e-5, 3e-5
"""Of a round of NCCL, roughly what 8 A100 take for a small all_reduce among them."""


def predicted(case: Case, corrections: Corrections) -> Cost:
    """What a step of it takes and holds, as corrected."""
    work = replace(case.workload, kernels=kernels(case.kernels, corrections))
    return case.cost(work, corrected(case.cluster, corrections), habits_of(case, corrections))


def kernels(expected: DeviceEfficiency, corrections: Corrections) -> DeviceEfficiency:
    """Return a device's efficiency as corrected."""
    return replace(
        expected,
        products=expected.products * corrections.products,
        bytes=expected.bytes * corrections.bytes,
        host_s=expected.host_s * corrections.host,
        call_s=expected.call_s * corrections.call,
        scores=expected.scores * corrections.scores,
    )


def corrected(cluster: Cluster, corrections: Corrections) -> Cluster:
    """With the bandwidths that collectives get."""
    assert isinstance(cluster.messages, Described), "a row's cluster is described"
    links = cluster.messages.links
    inside = links.inside_bytes_per_s * EXPECTED_INSIDE * corrections.inside
    between = links.between_bytes_per_s * EXPECTED_BETWEEN * corrections.between
    return replace(cluster, messages=Described(Links(inside, between, LATENCY_S, BETWEEN_LATENCY_S)))


def habits_of(case: Case, corrections: Corrections) -> OverlapModel:
    """Of the framework; older ones sum gradients after backward."""
    return replace(
        EXPECTED_HABITS,
        added_moves=0.0 if row_shapes.adds_in_products(case.row) else EXPECTED_HABITS.added_moves,
        overlap=min(1.0, EXPECTED_HABITS.overlap * corrections.overlap) if case.newer else 0.0,
        step_s=EXPECTED_HABITS.step_s * corrections.step,
        micro_batch_s=EXPECTED_HABITS.micro_batch_s * corrections.micro_batch,
    )
