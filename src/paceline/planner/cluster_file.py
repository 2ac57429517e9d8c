"""What is assumed of a cluster on which nothing was measured, and said so.

A cluster in words: by name, or from a TOML file.

By name: hosts, devices of each and the device, ``4x8 H100-80GB``; or the device alone for one of them.

::

    hosts = 4
    devices_per_host = 8
    device = "H100-80GB"            # or a section of its own:

    [device]
    flops_per_s = 989.5e12          # at the precision that is trained in
    memory_bytes = 80e9
    memory_bytes_per_s = 3.35e12
    kind = "cuda"                   # or "cpu"

    [links]                         # of each device, in one direction; may be left out for a device with a name
    inside_bytes_per_s = 450e9
    between_bytes_per_s = 50e9
    latency_s = 1e-5
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, unknown
from paceline.core.formatting import bytes_text
from paceline.core.types import Seconds
from paceline.planner import devices
from paceline.planner.base import OverlapModel, merged
from paceline.planner.cluster import Cluster, Described, Device, Links
from paceline.planner.shapes.shape_file import checked, section, section_of, text_of, toml

CUDA_CONTEXT_BYTES = 1.5 * 2**30
"""1 to 2 GiB are held by CUDA's context, its libraries and NCCL's buffers before the first parameter."""

CPU_CONTEXT_BYTES = 0.3 * 2**30
"""What a process holds that has imported torch, roughly."""


def assumed(cluster: Cluster) -> tuple[Cluster, OverlapModel]:
    """The cluster, with what is assumed among its provenance, and how a framework goes about it: nothing overlaps.

    >>> from paceline.planner.cluster_file import read
    >>> cluster, habits = assumed(read("1x8 A100-80GB"))
    >>> habits.overlap, cluster.provenance["context"]
    (0.0, 'assumed: 1.5 GiB of a worker before the first parameter')
    """
    held = CUDA_CONTEXT_BYTES if cluster.device.kind == "cuda" else CPU_CONTEXT_BYTES
    told = {
        "context": f"assumed: {bytes_text(held)} of a worker before the first parameter",
        "overlap": "assumed: none; summing over replicas and messages between stages hide behind nothing",
    }
    return replace(cluster, provenance=merged(cluster.provenance, told)), OverlapModel(context_bytes=held)


DATA_SHEET_SPREAD = 0.2
"""Assumed of a cluster beside what its workload's times are off."""
EFFICIENCY = 0.8
"""Of a link's bandwidth that collectives get: 8 A100 got 0.77 of theirs (benchmarks/planner), rounded."""
NAMED = re.compile(r"\s*(?:(\d+)\s*x\s*(\d+)\s+)?(\S+)\s*")


@dataclass(frozen=True, slots=True)
class _Top:
    hosts: int
    device: Any
    devices_per_host: int = 0
    name: str = ""
    links: Any = None


@dataclass(frozen=True, slots=True)
class _Device:
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    multiprocessors: int = 1
    kind: str = "cuda"
    name: str = "device"


@dataclass(frozen=True, slots=True)
class _Links:
    inside_bytes_per_s: float = 0.0
    between_bytes_per_s: float = 0.0
    latency_s: Seconds = 0.0
    between_latency_s: Seconds = 0.0


def read(told: str | Path, precision: str = "bf16-mixed") -> Cluster:
    """By name or from a file.

    Args:
        told: ``4x8 H100-80GB``, or the path of a file that ends with ``.toml``.
        precision: that is trained in, for a device that is named.

    Raises:
        InputError: neither; or a key is unknown, missing, of another kind or out of its range.

    >>> cluster = read("4x8 H100-80GB")
    >>> cluster.workers, cluster.device.flops_per_s, cluster.messages.links.between_bytes_per_s
    (32, 989500000000000.0, 50000000000.0)
    """
    if str(told).endswith(".toml"):
        return from_toml(text_of(Path(told)), Path(told).stem, precision)
    named = NAMED.fullmatch(str(told))
    if named is None:
        raise InputError(f'{str(told)!r} is no cluster; write "4x8 H100-80GB" or the path of a .toml file.')
    hosts, per_host = (int(each or 1) for each in named.groups()[:2])
    return _named(hosts, per_host, named.group(3), precision, str(told).strip())


def from_toml(text: str, name: str = "", precision: str = "bf16-mixed") -> Cluster:
    """From a file's text; see :func:`read`."""
    told = toml(text)
    top = _Top(**checked(_Top, told, ""))
    title = top.name or name
    links = checked(_Links, section(told, "links"), "links") if "links" in told else {}
    for what, value in links.items():
        _above_zero("links", what, value)
    if isinstance(top.device, str):
        return _linked(_named(top.hosts, top.devices_per_host, top.device, precision, title), links)
    if not isinstance(top.device, dict):
        raise InputError(f'device = {top.device!r} is neither a name nor a section; write device = "H100-80GB".')
    per_host = top.devices_per_host or 1
    _refuse_unlinked(top.hosts, per_host, links)
    return _linked(_cluster(top.hosts, per_host, _own(section(told, "device")), _NO_LINKS, title, {}), links)


_NO_LINKS = Links(1.0, 1.0)
"""Of a single device, which sends to nobody."""


def _named(hosts: int, per_host: int, device: str, precision: str, title: str) -> Cluster:
    """With the links that are usual beside the device."""
    sheet, made = devices.sheet(device), devices.device(device, precision)
    told = {"links": f"usual beside it ({sheet.source}), of which {EFFICIENCY:.0%} is assumed to be had"}
    return _cluster(hosts, per_host or sheet.devices_per_host, made, devices.messages(device).links, title, told)


def _own(told: Mapping[str, Any]) -> Device:
    found = checked(_Device, told, "device")
    for what, value in found.items():
        if isinstance(value, (int, float)):
            _above_zero("device", what, value)
    if found.get("kind", "cuda") not in ("cpu", "cuda"):
        raise unknown("kind of device", found["kind"], ("cpu", "cuda"))
    where = dict.fromkeys(("flops_per_s", "memory_bytes", "memory_bytes_per_s"), _WRITTEN)
    return Device(**{"name": "device", "kind": "cuda", **found}, provenance=where)


_WRITTEN = "written in the cluster's file"


def _cluster(hosts: int, per_host: int, device: Device, links: Links, title: str, told: Mapping[str, str]) -> Cluster:
    for what, value in (("hosts", hosts), ("devices_per_host", per_host)):
        _above_zero("", what, value)
    why = f"± {DATA_SHEET_SPREAD:.0%} is assumed, as nothing was measured there: data sheets say what is possible"
    where = {**device.provenance, **told, "spread": why}
    return Cluster(hosts, per_host, device, Described(links, EFFICIENCY), title, where, DATA_SHEET_SPREAD)


def _refuse_unlinked(hosts: int, per_host: int, links: Mapping[str, Any]) -> None:
    """A device of its own has no usual links."""
    for many, what in ((per_host, "inside_bytes_per_s"), (hosts, "between_bytes_per_s")):
        if many > 1 and what not in links:
            raise InputError(
                f"{hosts} hosts of {per_host} devices send to each other, but [links] does not say how fast; write "
                f"{what} = … under [links]."
            )


def _linked(cluster: Cluster, written: dict[str, Any]) -> Cluster:
    """With links as written, and what is not written as it was."""
    assert isinstance(cluster.messages, Described), "a cluster in words is described"
    if not written:
        return cluster
    if "latency_s" in written:
        written = {"between_latency_s": written["latency_s"]} | written
    links = replace(cluster.messages.links, **written)
    where = {**cluster.provenance, "links": _WRITTEN}
    return replace(cluster, messages=Described(links, EFFICIENCY), provenance=where)


def _above_zero(where: str, what: str, value: float) -> None:
    if value <= 0:
        raise InputError(f"{section_of(where)} says {what} = {value}, which is not above 0; write what it really is.")
