"""A simulated accelerator partly in C++: two devices, ``sim:0`` and ``sim:1``, with memory of their own.

It has what the one in Python can't: statistics of the memory, peaks among them, and an end of it (1 GiB a device);
streams and events; pinned memory; ``torch.Generator(device="sim")``. New and freed memory holds NaNs. Copies with
``non_blocking=True`` are as late as they may be: pinned memory that one is under way to holds NaNs until somebody waits
for the stream, an event behind the copy, or the device; and pinned memory that one is under way from is read then, or
before the next kernel. Operands on two devices are refused. Results are the CPU's in every bit.

Importing this module builds it (half a minute, once, in the folder ``build``), and installs it for the life of the
process, in which ``python_device`` must not be.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline import device
from paceline.comm import device_memory
from tests.accelerator import building, device_module, kernels
from tests.accelerator.device_module import NAME, as_host, copies
from tests.accelerator.memory_of_processes import SimulatedMemory

__all__ = ["NAME", "as_host", "copies", "install"]


@functools.cache
def install() -> None:
    """Register the device with torch; idempotent."""
    torch.utils.rename_privateuse1_backend(NAME)
    extension = building.build()
    torch._register_device_module(NAME, device_module)
    device.PINNED += (NAME,)
    torch.utils.generate_methods_for_privateuse1_backend()
    hardware = device_module.hardware
    hardware.devices, hardware.place, hardware.launch = 2, _copied_to, extension.run_uploads
    copy_from = functools.partial(_copy_from, extension)
    device_memory.register(NAME, SimulatedMemory())
    kernels.register({"_copy_from": copy_from, "_local_scalar_dense": _local_scalar_dense})


def _copied_to(x: Tensor, device: torch.device) -> Tensor:
    copied = torch.empty_like(x, device=device)
    as_host(copied).copy_(x)
    return copied


def _copy_from(extension: ModuleType, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    plain = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    plain = plain and source.shape == target.shape
    if non_blocking and plain and target.is_pinned():
        copies.to_host(target.nbytes, blocks=False)
        extension.run_uploads()
        extension.download(target, as_host(source), source.device.index)
        return target
    if non_blocking and plain and source.is_pinned():
        copies.to_device(target.nbytes, blocks=False)
        extension.run_uploads()  # into the same memory, if there are any, this one is behind
        extension.upload(as_host(target), source, target.device.index)
        return target
    if target.is_cpu:
        _wait_for_current_stream(source)
    return kernels.copy_from(source, target)


def _local_scalar_dense(x: Tensor) -> Any:
    _wait_for_current_stream(x)
    return kernels.local_scalar_dense(x)


def _wait_for_current_stream(x: Tensor) -> None:
    torch.accelerator.current_stream(x.device).synchronize()


install()
