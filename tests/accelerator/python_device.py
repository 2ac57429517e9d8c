"""A simulated accelerator in Python: one device ``sim:0``, whose tensors are host memory that only its kernels touch.

Its results are the CPU's in every bit, while torch and the code under test see an accelerator: operands on two devices
are refused, random numbers come from a generator of its own, and :data:`copies` counts what crosses between host and
device. Importing this module installs it, for the life of the process.

It has one device. All is done when a call returns, so streams and events never wait. torch 2.13 takes no allocator and
no generator from Python, so there are no memory statistics, no ``torch.empty(..., pin_memory=True)``
(``.pin_memory()`` works), and no ``torch.Generator(device="sim")``.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline import device
from paceline.comm import device_memory
from tests.accelerator import device_module, kernels
from tests.accelerator.device_module import NAME, alias_on_device, as_host, copies
from tests.accelerator.memory_of_processes import SimulatedMemory

__all__ = ["NAME", "as_host", "copies", "install"]


class Event(torch.Event):
    """A ``torch.Event`` that may be waited for; torch asks the device to, which is not possible in Python."""

    newest: "torch.Event | None" = None
    """The one that was recorded last."""

    def record(self, stream: torch.Stream | None = None) -> None:
        Event.newest = self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        copies.waits += Event.newest is self


def _synchronize(device: Any = None) -> None:
    pass


def _on_device(x: Tensor) -> Tensor:
    return alias_on_device(x, torch.device(NAME, 0))


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    wanted = memory_format or torch.contiguous_format
    return _on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=wanted))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _resize(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    whole = torch.empty(0, dtype=x.dtype, device="cpu")
    whole.resize_(size, memory_format=memory_format or torch.contiguous_format)
    kept = min(whole.numel(), x.numel())
    whole.view(-1)[:kept].copy_(as_host(x).reshape(-1)[:kept])
    return x.set_(_on_device(whole))


def _pin_memory(x: Tensor, device: torch.device | None = None) -> Tensor:
    pinned = x.clone()
    _PINNED[pinned.untyped_storage().data_ptr()] = pinned.untyped_storage()
    return pinned


def _is_pinned(x: Tensor, device: torch.device | None = None) -> bool:
    return x.untyped_storage().data_ptr() in _PINNED


def _new_storage(cls: type, *args: Any, device: Any = None, **options: Any) -> Any:
    """Create a storage, on the device too: for deepcopy and torch.load, which would crash without an allocator."""
    if device is None or torch.device(device).type != NAME:
        place = {} if device is None else {"device": device}
        return torch._C.StorageBase.__new__(cls, *args, **place, **options)
    return _on_device(torch.empty(*args, dtype=torch.uint8, device="cpu")).untyped_storage()


def _resize_storage(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
    """Resize a storage; on the device it keeps its memory, of NaNs while it is free, for FSDP to have it again."""
    if storage.device.type != NAME:
        return torch._C.StorageBase.resize_(storage, size_bytes)
    if size_bytes not in (0, storage.nbytes()):
        raise NotImplementedError(f"a storage of {storage.nbytes()} bytes on {NAME} can't be one of {size_bytes}")
    if size_bytes == 0:
        as_host(torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage)).fill_(255)
    return storage


KERNELS = {"empty.memory_format": _empty, "empty_strided": _empty_strided, "resize_": _resize}
CPU_KERNELS = {"_pin_memory": _pin_memory, "is_pinned": _is_pinned}

_PINNED = weakref.WeakValueDictionary[int, torch.UntypedStorage]()  # by address
_HOST = Library("aten", "IMPL")


@functools.cache
def install() -> None:
    """Register the device with torch; idempotent."""
    _setup_privateuseone_for_python_backend(NAME, device_module)
    device.PINNED += (NAME,)
    kernels.register(KERNELS)
    for name, kernel in CPU_KERNELS.items():
        _HOST.impl(name, kernel, "CPU")
    torch.accelerator.synchronize = _synchronize
    torch.Event = Event
    torch.UntypedStorage.__new__ = staticmethod(_new_storage)
    torch.UntypedStorage.resize_ = _resize_storage
    device_memory.register(NAME, SimulatedMemory())


install()
