"""Calibration of a shape's plans by rows that were measured: ``paceline plan --calibrate FILE.csv``.

::

    workload, cluster, overlap model  --corrections-->  search  -->  plans  --effects-->  plans, with their intervals

The ten corrections act where costs are computed, so that the whole search is calibrated; then each plan is a row, whose
effects (of its device, framework and source) scale its time and memory, and say how wide its intervals are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from paceline.planner.base import Arrangement, OverlapModel, Plan, WorkerMemory
from paceline.planner.calibration import calibrate
from paceline.planner.calibration.corrections import Case, corrected, kernels, overlap_of
from paceline.planner.calibration.refusals import usable
from paceline.planner.calibration.rows import GIB, PublishedRow, read
from paceline.planner.cluster import Cluster, Described
from paceline.planner.shapes.shape_file import DescribedWorkload


@dataclass(frozen=True)
class PlanCalibration:
    """calibrate.Calibration of the plans of a shape on a cluster.

    Args:
        times: of rows.
        memory: of rows.
        source: name of their file.
        described: the shape, before any correction.
        described_cluster: likewise.
    """

    times: calibrate.Calibration
    memory: calibrate.MemoryCalibration
    source: str
    described: DescribedWorkload
    described_cluster: Cluster
    left_out: Sequence[str] = ()
    """Why rows of the file were not used."""

    @classmethod
    def read(cls, path: Path, workload: DescribedWorkload, cluster: Cluster) -> "PlanCalibration":
        """Calibrate with those rows of a file that can be used.

        Raises:
            InputError: it can't be read, or too few rows have a step time.
        """
        rows, reasons = usable(read(path))
        times, memory = calibrate.calibrated(rows), calibrate.calibrated_memory(rows)
        return cls(times, memory, path.name, workload, cluster, reasons)

    @cached_property
    def _case(self) -> Case:
        """The case of one worker, at the rate of its device's family."""
        case = self.times.case(self.row(Arrangement(micro_batch=1)))
        assert case is not None, "it has a shape"
        return case

    @cached_property
    def workload(self) -> DescribedWorkload:
        """The shape with corrected kernels."""
        case = self._case
        efficiency = kernels(replace(self.described.kernels, products=case.kernels.products), self.times.corrections)
        return replace(self.described, kernels=efficiency, spread=0.0)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster with corrected links."""
        result = corrected(self.described_cluster, self.times.corrections)
        note = f"calibrated by {self.source}"
        provenance = {**result.provenance, "products": note, "links": note, "context": note, "overlap": note}
        if self.left_out:
            provenance["left out"] = "; ".join(self.left_out)
        device = replace(result.device, provenance={**result.device.provenance, "products": note})
        return replace(result, device=device, spread=0.0, provenance=provenance)

    @cached_property
    def overlap_model(self) -> OverlapModel:
        """Overlap and overheads of a framework like Paceline, with the corrections of times and of memory."""
        case = self._case
        context, activations = calibrate.memory_corrections(case.row, self.memory.deviations)
        return replace(overlap_of(case, self.times.corrections), context_bytes=context, fragmentation=activations)

    def row(self, a: Arrangement) -> PublishedRow:
        """Return an arrangement as a row of a table; schedules that tables don't have count as 1F1B."""
        shape, cluster, device = self.described.shape, self.described_cluster, self.described_cluster.device
        assert isinstance(cluster.messages, Described), "a cluster in words is described"
        links = cluster.messages.links
        columns: dict[str, object] = {
            "row_id": "plan",
            "source_id": "paceline",
            "framework": "Paceline",
            "hw": device.name,
        }
        columns |= {"gpu_mem_gb": device.memory_bytes / GIB, "peak_tflops": device.flops_per_s / 1e12}
        columns |= {"n_devices": a.workers, "dev_per_node": cluster.devices_per_host}
        columns |= {"intra_bw_GBps": links.inside_bytes_per_s / 1e9}
        columns |= {"inter_bw_GBps_per_dev": links.between_bytes_per_s / 1e9}
        columns |= {"model": self.described.name, "n_params": shape.parameters, "layers": shape.layers}
        columns |= {"hidden": shape.hidden, "heads": shape.heads, "ffn": shape.width}
        columns |= {"vocab": shape.vocab, "seq": shape.sequence}
        columns |= {"dp": a.replicas, "tp": a.shards, "pp": a.stages, "vpp": a.chunks, "zero": a.divided}
        columns |= {"mbs": a.micro_batch, "ga": a.micro_batches, "gbs": a.samples, "schedule": a.schedule}
        columns |= {"precision": self.described.precision, "recompute": "none" if a.recompute == "none" else "full"}
        return PublishedRow({name: str(value) for name, value in columns.items()})

    def plan(self, plan: Plan) -> Plan:
        """Return a plan that was computed with the corrections, with the effects and the intervals of its row."""
        row = self.row(plan.arrangement)
        case, time, room = self.times.case(row), self.times.forecast(row), self.memory.forecast(row)
        # The row's effects alone: the corrections are in the plan already.
        slower = time.step_s / calibrate.computed(row, case, self.times.corrections, self.times.flops_of)
        larger = room.bytes / calibrate.computed_bytes(row, case, self.memory.deviations)
        memory = tuple(
            WorkerMemory(*(larger * getattr(each, part.name) for part in fields(WorkerMemory)))
            for each in plan.cost.memory
        )
        cost = replace(plan.cost, terms={name: slower * s for name, s in plan.cost.terms.items()}, memory=memory)
        low, high = room.low_bytes / room.bytes - 1, room.high_bytes / room.bytes - 1
        notes = {
            "spread": f"calibrated by {self.source}: {time.why}",
            "memory": f"calibrated by {self.source}: nine of ten within {low:+.0%} to {high:+.0%}",
        }
        low_s, high_s = cost.step_s * time.low_s / time.step_s, cost.step_s * time.high_s / time.step_s
        rates = plan.samples_per_s / slower, None if plan.utilisation is None else plan.utilisation / slower
        provenance = {**plan.provenance, **notes}
        return Plan(plan.arrangement, cost, low_s, high_s, *rates, plan.strategy, plan.simulated, provenance)
