"""Devices by name, with the numbers of their data sheets.

Operations are those of dense matrices. Links are one direction of one device: a data sheet's number for both together
is halved. Memory that is sold as 80 GB has 80 GiB. Links between hosts are the network adapter that is usual with the
device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import InputError, unknown
from paceline.core.types import Seconds
from paceline.planner.cluster import Device
from paceline.planner.shapes.gemm_time import DeviceEfficiency

GB, GIB = 1e9, 2.0**30
T = 1e12


@dataclass(frozen=True, slots=True)
class Sheet:
    """Data sheet of a device."""

    flops_per_s: Mapping[str, float]
    """Peak by format: fp32, tf32, fp16, bf16, fp8, fp4."""
    memory_bytes: float
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float
    devices_per_host: int
    source: str
    multiprocessors: int = 1
    unit_hosts: int = 0
    """Hosts that are connected without contention, where a torus connects all; 0: switches do."""
    architecture: str = ""
    """Of which published rows taught :data:`TAUGHT`; empty: of none."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What published rows say of an architecture.

    Args:
        rate: of matrix products, as a factor of what is expected of them (gemm_time.py); 1 where rows that are left out
            are predicted no better by another.
        rows: their number.
        sources: their number.
        spread: nine of ten rows, each predicted by the rate of other models, are within this relative error.
    """

    rate: float
    rows: int
    sources: int
    spread: float

    def text(self) -> str:
        """Return the provenance of the rate.

        >>> Taught(0.5, 3, 2, 0.2).text()
        '0.40 of the peak, 0.5 of what is expected, by 3 published rows of 2 sources'
        """
        reached = self.rate * DeviceEfficiency().products
        rows = f"{self.rows} published rows of {self.sources} source{'s' * (self.sources > 1)}"
        return f"{reached:.2f} of the peak, {self.rate:.2g} of what is expected, by {rows}"


# By architecture: calibration/device_rates.py finds them in published rows (benchmarks/planner/calibration.md).
TAUGHT: Mapping[str, Taught] = {
    "Ampere": Taught(1.0, 27, 2, 0.15),
    "Hopper": Taught(0.67, 14, 4, 0.28),
    "Blackwell": Taught(0.95, 4, 1, 0.25),
    "Volta": Taught(0.55, 16, 2, 0.79),
    "A64FX": Taught(0.22, 6, 1, 1.03),
}


def _ampere(memory: float, bandwidth: float, inside: float, between: float, source: str) -> Sheet:
    flops = {"fp32": 19.5 * T, "tf32": 156 * T, "fp16": 312 * T, "bf16": 312 * T}
    return Sheet(flops, memory * GIB, bandwidth * GB, inside * GB, between * GB, 8, source, 108, architecture="Ampere")


def _hopper(memory: float, bandwidth: float) -> Sheet:
    flops = {"fp32": 67 * T, "tf32": 494.7 * T, "fp16": 989.5 * T, "bf16": 989.5 * T, "fp8": 1979 * T}
    source = "NVIDIA H100 and H200 data sheets, SXM5, dense"
    return Sheet(flops, memory * GIB, bandwidth * GB, 450 * GB, 50 * GB, 8, source, 132, architecture="Hopper")


def _blackwell(bf16: float, fp4: float, memory: float, bandwidth: float, per_host: int, source: str) -> Sheet:
    flops = {"fp32": 80 * T, "tf32": bf16 / 2 * T, "fp16": bf16 * T, "bf16": bf16 * T, "fp8": 2 * bf16 * T}
    flops["fp4"] = fp4 * T
    return Sheet(flops, memory * GIB, bandwidth * GB, 900 * GB, 50 * GB, per_host, source, 148, 0, "Blackwell")


def _volta(memory: float) -> Sheet:
    flops = {"fp32": 15.7 * T, "fp16": 125 * T}
    source = "NVIDIA V100 data sheet, SXM2"
    return Sheet(flops, memory * GIB, 900 * GB, 150 * GB, 12.5 * GB, 8, source, 80, architecture="Volta")


_H100_PCIE = Sheet(
    {"fp32": 51 * T, "tf32": 378 * T, "fp16": 756 * T, "bf16": 756 * T, "fp8": 1513 * T},
    80 * GIB, 2000 * GB, 64 * GB, 25 * GB, 8, "NVIDIA H100 data sheet, PCIe, dense", 114, 0, "Hopper",
)  # fmt: skip
_P40 = Sheet(
    {"fp32": 11.76 * T}, 24 * GIB, 346 * GB, 12 * GB, 1.25 * GB, 8, "NVIDIA Tesla P40 data sheet, PCIe 3.0", 30
)
_P100 = Sheet(
    {"fp32": 10.6 * T, "fp16": 21.2 * T}, 16 * GIB, 732 * GB, 80 * GB, 12.5 * GB, 8, "NVIDIA P100 data sheet, SXM2", 56
)
_T4 = Sheet({"fp32": 8.1 * T, "fp16": 65 * T}, 16 * GIB, 320 * GB, 12 * GB, 1.25 * GB, 4, "NVIDIA T4 data sheet", 40)
_A64FX = Sheet(
    {"fp32": 6.144 * T, "fp16": 12.288 * T}, 32 * GIB, 1024 * GB, 40.8 * GB, 6.8 * GB, 1,
    "Fujitsu A64FX: 48 cores at 2.0 GHz, 64 operations a cycle in fp32; TofuD 6 links of 6.8 GB/s, units of 12 hosts",
    48, 12, "A64FX",
)  # fmt: skip
_CPU = Sheet(
    {"fp32": 0.05 * T}, 4 * GIB, 10 * GB, 5 * GB, 1.25 * GB, 8,
    "assumed: one core of a present server, 16 fp32 operations a cycle at 3 GHz, and its part of the memory's channels",
)  # fmt: skip

# Name -> data sheet.
SHEETS: Mapping[str, Sheet] = {
    "A100-40GB": _ampere(40, 1555, 300, 25, "NVIDIA A100 data sheet, SXM4, dense"),
    "A100-80GB": _ampere(80, 2039, 300, 25, "NVIDIA A100 data sheet, SXM4, dense"),
    "A100-40GB-PCIe": _ampere(40, 1555, 32, 25, "NVIDIA A100 data sheet, PCIe 4.0, dense"),
    "A100-80GB-PCIe": _ampere(80, 1935, 32, 25, "NVIDIA A100 data sheet, PCIe 4.0, dense"),
    "H100-80GB": _hopper(80, 3350),
    "H100-94GB": _hopper(94, 3938),
    "H100-96GB": _hopper(96, 2400),
    "H100-80GB-PCIe": _H100_PCIE,
    "H200-141GB": _hopper(141, 4800),
    "B200-180GB": _blackwell(2250, 9000, 180, 8000, 8, "NVIDIA DGX B200 data sheet, dense"),
    "B300-288GB": _blackwell(2250, 13500, 288, 8000, 8, "NVIDIA DGX B300 data sheet, dense"),
    "GB200-186GB": _blackwell(2450, 10000, 186, 8000, 72, "NVIDIA GB200 NVL72 data sheet, dense"),
    "GB300-288GB": _blackwell(2450, 15000, 288, 8000, 72, "NVIDIA GB300 NVL72 data sheet, dense"),
    "V100-16GB": _volta(16),
    "V100-32GB": _volta(32),
    "P100-16GB": _P100,
    "P40-24GB": _P40,
    "T4-16GB": _T4,
    "A64FX-32GB": _A64FX,
    "CPU-core": _CPU,
}


def sheet(name: str) -> Sheet:
    """Look up by name, or by the family alone, of which it is the first entry.

    Raises:
        InputError: not known; the nearest one is named.

    >>> sheet("H200").memory_bytes, sheet("A100-80GB").flops_per_s["bf16"]
    (151397597184.0, 312000000000000.0)
    """
    if name in SHEETS:
        return SHEETS[name]
    for key, result in SHEETS.items():
        if name.lower() in (key.lower(), key.split("-")[0].lower()):
            return result
    raise unknown("device", name, SHEETS)


def taught(name: str) -> Taught | None:
    """Return what published rows say of a device; None where it has no name here, or there are none.

    >>> taught("H200-141GB") == TAUGHT["Hopper"], taught("device")
    (True, None)
    """
    try:
        return TAUGHT.get(sheet(name).architecture)
    except InputError:
        return None


def device(name: str, precision: str = "bf16-mixed") -> Device:
    """Return a device by name, at the training precision: ``fp32``, or the format of matrix products ``-mixed``.

    Raises:
        InputError: the device is not known, or has no such arithmetic.

    >>> device("V100-32GB", "fp16-mixed").flops_per_s
    125000000000000.0
    """
    data = sheet(name)
    flops = data.flops_per_s.get(precision.removesuffix("-mixed"))
    if flops is None:
        best = max(data.flops_per_s, key=lambda each: data.flops_per_s[each])
        mixed = best if best in ("fp32", "tf32") else f"{best}-mixed"
        raise InputError(f'precision = "{precision}": {name} has no such arithmetic; write precision = "{mixed}".')
    provenance = dict.fromkeys(("flops_per_s", "memory_bytes", "memory_bytes_per_s"), data.source)
    kind: Literal["cpu", "cuda"] = "cpu" if name.upper().startswith(("CPU", "A64FX")) else "cuda"
    if data.architecture in TAUGHT:
        provenance["products"] = TAUGHT[data.architecture].text()
    provenance["launch"] = f"{LAUNCH_S[kind] * 1e6:.2g} µs at least for a kernel, as measured on other devices"
    rates = flops, data.memory_bytes, data.memory_bytes_per_s
    return Device(name, *rates, provenance, data.multiprocessors, kind, LAUNCH_S[kind])


# Least time of a kernel, however small, by kind of device. CUDA: what the smallest of 72 matrix products took on an
# H100 (gemm_time.py); eager PyTorch needs 5 to 10 µs of its host for each, too. CPU: torch.relu of one element with
# torch 2.13 on a core of an AMD EPYC takes 1.1 µs, a product of one by one 1.9 µs.
LAUNCH_S: Mapping[Literal["cpu", "cuda"], Seconds] = {"cuda": DeviceEfficiency().product_start_s, "cpu": 1.1e-6}

# Latency of a collective's round: the 79 µs that 8 A100 took for 1 MiB beyond its bytes, in 2 log2 8 rounds (vTrain's
# tables); between hosts twice as long is assumed.
ROUND_S = 1.3e-5
