"""Clusters in words: by name, or from a TOML file; and the defaults of a cluster on which nothing was measured.

By name: hosts, devices of each and the device, ``4x8 H100-80GB``; or the device alone for one of them.

::

    hosts = 4
    devices_per_host = 8
    device = "H100-80GB"            # or a section of its own:

    [device]
    flops_per_s = 989.5e12          # at the training precision
    memory_bytes = 80e9
    memory_bytes_per_s = 3.35e12
    kind = "cuda"                   # or "cpu"

    [links]                         # of each device, in one direction; may be left out for a device with a name
    inside_bytes_per_s = 450e9
    between_bytes_per_s = 50e9
    latency_s = 1e-5

What virtual time reads of the same file beside hosts and links, clock/network.py says; the planner passes it over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.clock.cluster_file import Links, cluster_keys, given_links, refuse_not_positive
from paceline.core.errors import InputError, unknown
from paceline.core.formatting import bytes_text
from paceline.core.toml_sections import checked, text_of
from paceline.planner import devices
from paceline.planner.base import OverlapModel, merged
from paceline.planner.cluster import Cluster, Described, Device

# CUDA's context, its libraries and NCCL's buffers take 1 to 2 GiB before the first parameter.
CUDA_CONTEXT_BYTES = 1.5 * 2**30

# Memory of a process that has imported torch, roughly.
CPU_CONTEXT_BYTES = 0.3 * 2**30

# Assumed relative error because of the cluster, in addition to that of its workload's times.
DATA_SHEET_SPREAD = 0.2

# Share of a link's bandwidth that collectives get: 8 A100 got 0.77 of theirs (benchmarks/planner), rounded.
EFFICIENCY = 0.8

NAMED = re.compile(r"\s*(?:(\d+)\s*x\s*(\d+)\s+)?(\S+)\s*")

_SIZES = re.compile(r"\d+x\d+")

_FROM_FILE = "written in the cluster's file"


def assumed(cluster: Cluster) -> tuple[Cluster, OverlapModel]:
    """Return the cluster with its assumptions among its provenance, and the default overlap model: nothing overlaps.

    >>> cluster, overlap_model = assumed(read("1x8 A100-80GB"))
    >>> overlap_model.overlap, cluster.provenance["context"]
    (0.0, 'assumed: 1.5 GiB of a worker before the first parameter')
    """
    context_bytes = CUDA_CONTEXT_BYTES if cluster.device.kind == "cuda" else CPU_CONTEXT_BYTES
    assumptions = {
        "context": f"assumed: {bytes_text(context_bytes)} of a worker before the first parameter",
        "overlap": "assumed: none; the sum over replicas and messages between stages do not overlap with compute",
    }
    assumed_cluster = replace(cluster, provenance=merged(cluster.provenance, assumptions))
    return assumed_cluster, OverlapModel(context_bytes=context_bytes)


@dataclass(frozen=True, slots=True)
class _DeviceKeys:
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    multiprocessors: int = 1
    kind: str = "cuda"
    name: str = "device"


def read(source: str | Path, precision: str = "bf16-mixed") -> Cluster:
    """Read a cluster by name or from a file.

    Args:
        source: ``4x8 H100-80GB``, or the path of a file that ends with ``.toml``.
        precision: of the training, for a device that is named.

    Raises:
        InputError: neither; or a key is unknown, missing, of another kind or out of its range.

    >>> cluster = read("4x8 H100-80GB")
    >>> cluster.workers, cluster.device.flops_per_s, cluster.messages.links.between_bytes_per_s
    (32, 989500000000000.0, 50000000000.0)
    """
    if str(source).endswith(".toml"):
        return from_toml(text_of(Path(source)), Path(source).stem, precision)
    match = NAMED.fullmatch(str(source))
    if match is None:
        raise InputError(f'{str(source)!r} is no cluster; write "4x8 H100-80GB" or the path of a .toml file.')
    if _SIZES.fullmatch(match.group(3)):
        raise InputError(f'{str(source)!r} names no device; write "{match.group(3)} H100-80GB", say.')
    hosts, per_host = (1 if each is None else int(each) for each in match.groups()[:2])
    if not (hosts and per_host):
        raise InputError(f'{str(source)!r} has no device; write "1x8 {match.group(3)}", say: hosts x devices of each.')
    return _named(hosts, per_host, match.group(3), precision, str(source).strip())


def from_toml(text: str, name: str = "", precision: str = "bf16-mixed") -> Cluster:
    """Read a cluster from a file's text; see :func:`read`."""
    keys = cluster_keys(text)
    title = keys.name or name
    usual = {"inside_bytes_per_s": 1.0, "between_bytes_per_s": 1.0}  # of a device with a name those of its sheet
    links = {} if keys.links is None else given_links(keys, usual)
    if keys.device is None:
        raise InputError('the file has no device; write device = "H100-80GB", or a section [device].')
    if isinstance(keys.device, str):
        cluster = _named(keys.hosts, keys.devices_per_host, keys.device, precision, title)
    elif isinstance(keys.device, dict):
        hosts, per_host = keys.hosts, keys.devices_per_host or 1
        for many, key in ((per_host, "inside_bytes_per_s"), (hosts, "between_bytes_per_s")):
            if many > 1 and key not in links:  # a device of its own has no usual links
                raise InputError(
                    f"{hosts} hosts of {per_host} devices send to each other, but [links] does not say how fast; write "
                    f"{key} = … under [links]."
                )
        lines = checked(_DeviceKeys, keys.device, "device")
        refuse_not_positive("device", lines)
        if lines.get("kind", "cuda") not in ("cpu", "cuda"):
            raise unknown("kind of device", lines["kind"], ("cpu", "cuda"))
        provenance = dict.fromkeys(("flops_per_s", "memory_bytes", "memory_bytes_per_s"), _FROM_FILE)
        words: dict[str, Any] = {"name": "device", "kind": "cuda", **lines}
        device = Device(**words, provenance=provenance, launch_s=devices.LAUNCH_S[words["kind"]])
        # Of one device on each host: a copy in memory reads and writes each byte.
        inside = device.memory_bytes_per_s / 2
        cluster = _described(hosts, per_host, device, Links(inside, 1.0), title, {})
    else:
        raise InputError(f'device = {keys.device!r} is neither a name nor a section; write device = "H100-80GB".')
    if not links:
        return cluster
    assert isinstance(cluster.messages, Described), "a cluster in words is described"
    messages = replace(cluster.messages, links=replace(cluster.messages.links, **links))
    return replace(cluster, messages=messages, provenance={**cluster.provenance, "links": _FROM_FILE})


def _named(hosts: int, per_host: int, name: str, precision: str, title: str) -> Cluster:
    """Return a cluster of devices with a data sheet, and the links that are usual with them."""
    sheet, device = devices.sheet(name), devices.device(name, precision)
    source = {"links": f"usual with it ({sheet.source}), of which {EFFICIENCY:.0%} is assumed to be available"}
    latencies_s = devices.ROUND_S, 2 * devices.ROUND_S
    links = Links(sheet.inside_bytes_per_s, sheet.between_bytes_per_s, *latencies_s)
    return _described(hosts, per_host or sheet.devices_per_host, device, links, title, source, sheet.unit_hosts)


def _described(
    hosts: int,
    per_host: int,
    device: Device,
    links: Links,
    title: str,
    source: Mapping[str, str],
    unit_hosts: int = 0,
) -> Cluster:
    refuse_not_positive("", {"hosts": hosts, "devices_per_host": per_host})
    why = f"± {DATA_SHEET_SPREAD:.0%} is assumed, as nothing was measured there: data sheets say what is possible"
    provenance = {**device.provenance, **source, "spread": why}
    return Cluster(
        hosts, per_host, device, Described(links, EFFICIENCY, unit_hosts), title, provenance, DATA_SHEET_SPREAD
    )
