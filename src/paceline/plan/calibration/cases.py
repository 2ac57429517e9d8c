"""A published row that can be counted layer by layer, with what it leaves open settled.

Where it does not say what is divided among replicas, what is computed again, or how many samples a micro-batch has, it
is taken for the least that fits its device: whoever published it has trained so.
"""

from dataclasses import dataclass, replace
from itertools import product

from paceline.plan.base import Arrangement, Cost, Numerics, Recomputed
from paceline.plan.calibration import frameworks, machines, published
from paceline.plan.calibration.rows import Row
from paceline.plan.cluster import Cluster
from paceline.plan.cost import cost
from paceline.plan.division import Division, stages
from paceline.plan.habits import Habits
from paceline.plan.shapes.described import DescribedWorkload
from paceline.plan.shapes.kernels import Kernels
from paceline.plan.shapes.shape import Shape


@dataclass(frozen=True)
class Case:
    """A row that can be counted layer by layer."""

    row: Row
    shape: Shape
    arrangement: Arrangement
    cluster: Cluster
    numerics: Numerics
    kernels: Kernels
    """As expected of its device."""
    newer: bool

    @classmethod
    def of(cls, row: Row) -> "Case | None":
        """None: there is no shape."""
        found = published.shape(row)
        return None if found is None else _settled(row, found)

    @property
    def workload(self) -> DescribedWorkload:
        """Of it, as expected of its device."""
        told = frameworks.precision(self.row)
        return DescribedWorkload(self.shape, self.cluster.device, 1, told, kernels=self.kernels, held_as=self.numerics)

    @property
    def cuts(self) -> tuple[int, ...]:
        """As many blocks on each stage, the embedding on the first and the head on the last."""
        parts = self.arrangement.stages * self.arrangement.chunks
        return tuple(1 + round(part * self.shape.layers / parts) for part in range(1, parts))

    def cost(self, workload: DescribedWorkload, cluster: Cluster, habits: Habits) -> Cost:
        """Of a step."""
        layers = workload.layers(self.arrangement)
        row = stages(layers, self.cuts, self.arrangement, cluster)
        return cost(workload, cluster, self.arrangement, habits, Division(layers, self.cuts, row))


def _settled(row: Row, shape: Shape) -> Case:
    """With what the row leaves open: the first that fits, or the last."""
    found = published.arrangement(row)
    where, divided = machines.cluster(row, found.workers), _levels(row, found.divided)
    again: tuple[Recomputed, ...] = (found.recompute,) if _told(row) or frameworks.newer(row) else ("none", "full")
    for recompute, samples, level in product(again, _samples(row, found), divided):
        many = max(1, round(found.samples / found.replicas / samples))
        tried = replace(found, divided=level, recompute=recompute, micro_batch=samples, micro_batches=many)
        case = Case(
            row, shape, tried, where, frameworks.numerics(row, tried), frameworks.kernels(row), frameworks.newer(row)
        )
        if case.cost(case.workload, where, Habits()).most.total < _FILLED * where.device.memory_bytes:
            break
    return case


def _levels(row: Row, told: int) -> tuple[int, ...]:
    """What may be divided among replicas: Megatron-Core's distributed optimizer is often written down as none."""
    if not row.text("zero"):
        return (0, 1, 3)
    if told == 3 and frameworks.keeps_whole(row):
        return (1,)
    return (0, 1) if told == 0 and frameworks.newer(row) else (told,)


def _samples(row: Row, found: Arrangement) -> tuple[float, ...]:
    """Of a micro-batch, where a row does not tell: as many as fit, but no more than are likely."""
    if row.text("mbs") or not row.text("gbs"):
        return (found.micro_batch,)
    return tuple(samples for samples in (4.0, 2.0, 1.0) if samples <= found.micro_batch) or (found.micro_batch,)


_FILLED = 0.9
"""Of a device's memory: the rest is the runtime's."""


def _told(row: Row) -> bool:
    """Whether a row says what is computed again, if only that it is not all: ``unknown (selective/none)``."""
    text = row.text("recompute")
    return bool(text) and (not text.startswith("unknown") or "none" in text)
