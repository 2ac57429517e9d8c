"""The few numbers that a calibration finds, each with what it is expected to be before any row is seen.

All are above 0 and stand as factors of what is expected: 1 says that nothing was learnt. They act where costs are
computed (blocks.py, cost.py), never on what comes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp

from paceline.plan.base import Cost
from paceline.plan.calibration import frameworks
from paceline.plan.calibration.cases import Case
from paceline.plan.cluster import Cluster, Described, Links
from paceline.plan.habits import Habits
from paceline.plan.shapes.kernels import Kernels


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

EXPECTED_HABITS = Habits(overlap=0.7, step_s=5e-3, micro_batch_s=2e-3)
EXPECTED_INSIDE, EXPECTED_BETWEEN = 0.8, 0.7
LATENCY_S, BETWEEN_LATENCY_S = 1.5e-5, 3e-5
"""Of a round of NCCL, roughly what 8 A100 take for a small all_reduce among them."""


def predicted(case: Case, corrections: Corrections) -> Cost:
    """What a step of it takes and holds, as corrected."""
    work = replace(case.workload, kernels=kernels(case, corrections))
    return case.cost(work, corrected(case.cluster, corrections), habits_of(case, corrections))


def kernels(case: Case, corrections: Corrections) -> Kernels:
    """Of its device."""
    return replace(
        case.kernels,
        products=case.kernels.products * corrections.products,
        bytes=case.kernels.bytes * corrections.bytes,
        host_s=case.kernels.host_s * corrections.host,
        call_s=case.kernels.call_s * corrections.call,
        scores=case.kernels.scores * corrections.scores,
    )


def corrected(cluster: Cluster, corrections: Corrections) -> Cluster:
    """With the bandwidths that collectives get."""
    assert isinstance(cluster.messages, Described), "a row's cluster is described"
    links = cluster.messages.links
    inside = links.inside_bytes_per_s * EXPECTED_INSIDE * corrections.inside
    between = links.between_bytes_per_s * EXPECTED_BETWEEN * corrections.between
    return replace(cluster, messages=Described(Links(inside, between, LATENCY_S, BETWEEN_LATENCY_S)))


def habits_of(case: Case, corrections: Corrections) -> Habits:
    """Of the framework; older ones sum gradients after backward."""
    return replace(
        EXPECTED_HABITS,
        added_moves=0.0 if frameworks.adds_in_products(case.row) else EXPECTED_HABITS.added_moves,
        overlap=min(1.0, EXPECTED_HABITS.overlap * corrections.overlap) if case.newer else 0.0,
        step_s=EXPECTED_HABITS.step_s * corrections.step,
        micro_batch_s=EXPECTED_HABITS.micro_batch_s * corrections.micro_batch,
    )
