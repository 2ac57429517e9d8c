"""Bytes that are copied between host and device, as the simulated accelerator counts them, or torch's profiler."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from tests.accelerator.target import SIMULATED


@dataclass
class Copied:
    """Bytes of one step; and how often the host has asked whether a collective on the device is complete."""

    to_host: int = 0
    to_device: int = 0
    polls: int = 0


@contextlib.contextmanager
def counted(kind: str) -> Iterator[Copied]:
    """Context manager: what is copied inside, once it has ended."""
    found = Copied()
    if kind == SIMULATED:
        torch.sim.copies.reset()
        yield found
        copies = torch.sim.copies
        found.to_host, found.to_device, found.polls = copies.to_host_bytes, copies.to_device_bytes, copies.polls
        return
    torch.accelerator.synchronize()  # what was begun before is none of it
    with profile() as profiler:
        yield found
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        traced = of_trace(json.loads(path.read_text(encoding="utf-8")))
    found.to_host, found.to_device = traced.to_host, traced.to_device


def of_trace(trace: Mapping[str, Any]) -> Copied:
    """Return the bytes that a trace of torch's profiler has, as Chrome reads it.

    Raises:
        RuntimeError: it has nothing of a device, so that no copies would mean nothing.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy")]
    if not events:
        raise RuntimeError("the profiler has recorded no kernel and no copy; is CUPTI there, and may this user use it?")
    found = Copied()
    for event in events:
        if event["cat"] == "gpu_memcpy":
            found.to_host += event["args"]["bytes"] if "DtoH" in event["name"] else 0
            found.to_device += event["args"]["bytes"] if "HtoD" in event["name"] else 0
    return found
