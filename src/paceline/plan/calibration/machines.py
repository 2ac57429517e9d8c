"""What a published row was trained on: as told, by data sheets where it is not."""

from typing import Literal

from paceline.plan.calibration.frameworks import precision
from paceline.plan.calibration.rows import GIB, Row
from paceline.plan.cluster import Cluster, Described, Device, Links
from paceline.plan.clusters.devices import SHEETS, Sheet


def sheet(row: Row) -> Sheet | None:
    """Of its device; None: a family without one."""
    found = [each for name, each in SHEETS.items() if name.upper().startswith(row.family)] if row.family else []
    memory = (row.number("gpu_mem_gb") or 0) * GIB
    return min(found, key=lambda each: abs(each.memory_bytes - memory)) if found else None


def plain_flops_per_s(row: Row) -> float:
    """Of its device, at 16 bits where it is trained with fewer."""
    found = device(Row({**row.told, "precision": "bf16"} if precision(row) in ("fp8-mixed", "fp4-mixed") else row.told))
    return min(found.flops_per_s, device(row).flops_per_s)


def device(row: Row) -> Device:
    """By what the row says, by its data sheet where it doesn't, or else an A100's."""
    known = sheet(row) or SHEETS["A100-80GB"]
    told = precision(row)
    peak = (row.number("peak_tflops") or 0) * 1e12
    base = known.flops_per_s.get("bf16") or max(known.flops_per_s.values())
    peak = peak or known.flops_per_s.get(told.removesuffix("-mixed"), base)
    if told in ("fp8-mixed", "fp4-mixed"):
        peak = max(peak, known.flops_per_s.get(told.removesuffix("-mixed"), 0.0))
    memory = (row.number("gpu_mem_gb") or 0) * GIB or known.memory_bytes
    kind: Literal["cpu", "cuda"] = "cpu" if row.family in HOSTS else "cuda"
    return Device(row.text("hw"), peak, memory, known.memory_bytes_per_s, {}, known.multiprocessors, kind)


HOSTS = ("A64FX", "CPU")
"""Families that are no accelerators."""


def cluster(row: Row, workers: int) -> Cluster:
    """Hosts with links as told, or as usual beside its device."""
    known = sheet(row) or SHEETS["A100-80GB"]
    per_host = row.whole("dev_per_node", known.devices_per_host)
    devices = row.whole("n_devices", workers)
    inside = (row.number("intra_bw_GBps") or 0) * 1e9 or known.inside_bytes_per_s
    between = (row.number("inter_bw_GBps_per_dev") or 0) * 1e9 or known.between_bytes_per_s
    return Cluster(-(-devices // per_host), per_host, device(row), Described(Links(inside, between)))
