"""Published rows counted layer by layer, and the ten numbers that a calibration finds from them.

Each number is a factor of what is expected before any row is seen: 1 says that nothing was learnt. They act where costs
are computed (blocks.py, cost.py), never on results.

Where a row does not say what is divided among replicas, what is recomputed, or how many samples a micro-batch has, it
is taken for the least that fits its device, since it was trained so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp
from typing import Any

from paceline.clock.cluster_file import Links
from paceline.planner.base import Arrangement, Cost, Numerics, OverlapModel, Recomputed, Workload
from paceline.planner.calibration import row_shapes
from paceline.planner.calibration.mixtures import Experts, MixtureWorkload, mixture
from paceline.planner.calibration.rows import PublishedRow
from paceline.planner.cluster import Cluster, Described
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
    experts: Experts | None = None
    """Of each block, in addition to its shape."""

    @classmethod
    def of(cls, row: PublishedRow) -> "Case | None":
        """Return the case of a row; None if it has no shape.

        What the row leaves open is settled in the first way that fits its device, or the last.
        """
        shape, experts = row_shapes.shape(row), None
        if shape is None:
            found = mixture(row)
            if found is None:
                return None
            shape, experts = found
        given = row_shapes.arrangement(row)
        cluster, kernels = row_shapes.cluster(row, given.workers), row_shapes.kernels(row)
        for recompute, samples, level in _choices(row, given):
            many = max(1, round(given.samples / given.replicas / samples))
            tried = replace(given, divided=level, recompute=recompute, micro_batch=samples, micro_batches=many)
            case = cls(row, shape, tried, cluster, row_shapes.numerics(row, tried), kernels, experts)
            if case.cost(case.workload, cluster, OverlapModel()).peak.total < _FILLED * cluster.device.memory_bytes:
                break
        return case

    def at_rate(self, rate: float) -> "Case":
        """Return the same on a device whose products reach so many times what is expected of them."""
        return replace(self, kernels=replace(self.kernels, products=rate * self.kernels.products))

    @property
    def experts_optimizer_bytes(self) -> float:
        """Bytes of the experts' optimizer state that a worker has more than if all replicas divided it: only those that
        have the same experts do, one in so many as there are ways to divide experts."""
        work, a = self.workload, self.arrangement
        if not isinstance(work, MixtureWorkload) or not a.divided:
            return 0.0
        ways = min(a.experts, a.replicas)
        own = work.expert_parameters(ways) / a.stages * self.numerics.optimizer
        return own * (ways - 1) / a.replicas

    @property
    def workload(self) -> Workload:
        """The workload, as expected of its device."""
        return self.corrected_workload(self.kernels, self.cluster)

    def corrected_workload(self, kernels: DeviceEfficiency, cluster: Cluster) -> Workload:
        """Return the workload with these kernels and, for tokens that are sent to experts, this cluster's links."""
        device, precision = self.cluster.device, row_shapes.precision(self.row)
        blocks = DescribedWorkload(self.shape, device, 1, precision, kernels=kernels, parameter_bytes=self.numerics)
        if self.experts is None:
            return blocks
        assert isinstance(cluster.messages, Described), "a row's cluster is described"
        return MixtureWorkload(blocks, self.experts, cluster.messages.links, cluster.devices_per_host)

    def cost(self, workload: Workload, cluster: Cluster, overlap: OverlapModel) -> Cost:
        """Return the cost of a step: as many blocks on each stage, the embedding on the first, the head on the last."""
        layers, parts = workload.layers(self.arrangement), self.arrangement.stages * self.arrangement.chunks
        cuts = tuple(1 + round(part * self.shape.layers / parts) for part in range(1, parts))
        division = StageDivision(layers, cuts, stages_of(layers, cuts, self.arrangement, cluster))
        return cost(workload, cluster, self.arrangement, overlap, division)


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
    """Of what a micro-batch takes in addition."""
    step: float = 1.0
    """Of what a step takes in addition."""
    scores: float = 1.0
    """Of what attention that is fused gets of the rate of products."""

    @classmethod
    def of(cls, deviations: Sequence[float]) -> "Corrections":
        """Return the corrections that are so many standard deviations off what is expected, in logarithms."""
        return cls(*(exp(spread * each) for spread, each in zip(SPREADS, deviations, strict=True)))


# Standard deviations of logarithms: what a device does is known better than what a framework adds.
SPREADS = (0.08, 0.3, 0.5, 0.5, 0.15, 0.3, 0.2, 0.4, 0.4, 0.4)

EXPECTED_OVERLAP = OverlapModel(overlap=0.7, step_s=5e-3, micro_batch_s=2e-3)
EXPECTED_INSIDE, EXPECTED_BETWEEN = 0.8, 0.7
# Of a round of NCCL, roughly what 8 A100 take for a small all_reduce among them.
LATENCY_S, BETWEEN_LATENCY_S = 1.5e-5, 3e-5


def _choices(row: PublishedRow, given: Arrangement) -> Iterator[tuple[Recomputed, float, int]]:
    """Return the recomputations, the samples of a micro-batch and the ZeRO levels that a row may mean."""
    newer, text = row_shapes.newer(row), row.text("recompute")
    # A row may say no more than that not everything is recomputed: "unknown (selective/none)".
    says = text and (not text.startswith("unknown") or "none" in text)
    recomputed: tuple[Recomputed, ...] = (given.recompute,) if says or newer else ("none", "full")
    samples: tuple[float, ...] = (given.micro_batch,)
    if row.text("gbs") and not row.text("mbs"):  # the largest that fits, of the likely ones
        samples = tuple(each for each in (4.0, 2.0, 1.0) if each <= given.micro_batch) or samples
    levels: tuple[int, ...] = (given.divided,)
    if not row.text("zero"):
        levels = (0, 1, 3)
    elif given.divided == 3 and row_shapes.keeps_whole(row):
        levels = (1,)
    elif given.divided == 0 and newer:  # Megatron-Core's distributed optimizer is often written as none
        levels = (0, 1)
    return product(recomputed, samples, levels)


# Of a device's memory: the rest is the runtime's.
_FILLED = 0.9


def predicted(case: Case, corrections: Corrections) -> Cost:
    """Return what a step of a case takes and holds, as corrected."""
    cluster = corrected(case.cluster, corrections)
    workload = case.corrected_workload(kernels(case.kernels, corrections), cluster)
    return case.cost(workload, cluster, overlap_of(case, corrections))


def kernels(expected: DeviceEfficiency, corrections: Corrections) -> DeviceEfficiency:
    """Return a device's efficiency as corrected."""
    factors = {"products": corrections.products, "bytes": corrections.bytes, "host_s": corrections.host}
    factors |= {"call_s": corrections.call, "scores": corrections.scores}
    changed: dict[str, Any] = {name: getattr(expected, name) * factor for name, factor in factors.items()}
    return replace(expected, **changed)


def corrected(cluster: Cluster, corrections: Corrections) -> Cluster:
    """Return the cluster with the bandwidths that collectives get."""
    assert isinstance(cluster.messages, Described), "a row's cluster is described"
    links = cluster.messages.links
    inside = links.inside_bytes_per_s * EXPECTED_INSIDE * corrections.inside
    between = links.between_bytes_per_s * EXPECTED_BETWEEN * corrections.between
    links = Links(inside, between, LATENCY_S, BETWEEN_LATENCY_S)
    return replace(cluster, messages=Described(links, unit_hosts=cluster.messages.unit_hosts))


def overlap_of(case: Case, corrections: Corrections) -> OverlapModel:
    """Return the framework's overlap model; older ones sum gradients after backward."""
    expected = EXPECTED_OVERLAP
    overlap = min(1.0, expected.overlap * corrections.overlap) if row_shapes.newer(case.row) else 0.0
    added_moves = 0.0 if row_shapes.adds_in_products(case.row) else expected.added_moves
    step_s, micro_batch_s = expected.step_s * corrections.step, expected.micro_batch_s * corrections.micro_batch
    return OverlapModel(overlap, step_s=step_s, micro_batch_s=micro_batch_s, added_moves=added_moves)
