"""A simulated accelerator in Python: one device ``sim:0``, whose tensors are host memory that only its kernels touch.

Its results are the CPU's in every bit, while torch and the code under test see an accelerator: operands on two devices
are refused, random numbers come from a generator of its own, and :data:`copies` counts what crosses between host and
device. Importing this module installs it, for the life of the process; it is the device module ``torch.sim`` then, with
the functions that torch asks such a module for.

It has one device. All is done when a call returns, so streams and events never wait. torch 2.13 takes no allocator and
no generator from Python, so there are no memory statistics, no ``torch.empty(..., pin_memory=True)``
(``.pin_memory()`` works), and no ``torch.Generator(device="sim")``.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.accelerator import composite_kernels
from tests.accelerator.host_kernels import (
    NAME,
    as_host,
    as_sim,
    by_host,
    copies,
    generator,
    operations_with_kernel,
    schema_name,
)

__all__ = ["NAME", "as_host", "as_sim", "copies", "install"]

aten = torch.ops.aten

# ------------------------------------------------------------------------------- what torch asks a device module for


def is_available() -> bool:
    return True


is_initialized = is_available
_initialized = True  # what torch.utils.checkpoint asks for


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    pass


def synchronize(device: Any = None) -> None:
    pass


class Event(torch.Event):
    """A ``torch.Event`` that may be synchronised with; torch asks the device to, which is not possible in Python."""

    def synchronize(self) -> None:
        pass


class device(contextlib.nullcontext[None]):  # noqa: N801 (torch's name)
    """Context manager in which the only device is the current one."""


def manual_seed(seed: int) -> None:
    generator.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    generator.seed()


seed_all = seed
initial_seed = generator.initial_seed


def get_rng_state(device: Any = NAME) -> Tensor:
    return generator.get_state()


def set_rng_state(new_state: Tensor, device: Any = NAME) -> None:
    generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ------------------------------------------------------------------------------------------------------------- kernels

VIEWS: tuple[OpOverload, ...] = (
    aten.view.default,
    aten.as_strided.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
)
"""The CPU's kernels for these only make another tensor of the same storage, wherever it is."""


def _viewed(op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    return op.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    wanted = memory_format or torch.contiguous_format
    return as_sim(torch.empty(size, dtype=dtype, device="cpu", memory_format=wanted))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return as_sim(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if target.is_cpu:
        copies.to_host(target.nbytes)
    elif source.is_cpu:
        copies.to_device(target.nbytes)
    as_host(target).copy_(as_host(source))
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return _copy_from(source, target.resize_(source.shape))


def _resize(x: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Tensor:
    whole = torch.empty(0, dtype=x.dtype, device="cpu")
    whole.resize_(size, memory_format=memory_format or torch.contiguous_format)
    kept = min(whole.numel(), x.numel())
    whole.view(-1)[:kept].copy_(as_host(x).reshape(-1)[:kept])
    return x.set_(as_sim(whole))


def _local_scalar_dense(x: Tensor) -> Any:
    copies.to_host(x.element_size())
    return as_host(x).item()


def _record_stream(x: Tensor, stream: torch.Stream) -> None:
    pass


def _convolution(*args: Any) -> Tensor:
    return by_host(aten.convolution.default, *args)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *geometry, mask = others
    return by_host(aten.convolution_backward.default, grad, x, weight, [len(grad[0])], *geometry, mask)


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
    return as_sim(torch.empty(*args, dtype=torch.uint8, device="cpu")).untyped_storage()


KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "resize_": _resize,
    "record_stream": _record_stream,
    "_local_scalar_dense": _local_scalar_dense,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}

CPU_KERNELS = {"_pin_memory": _pin_memory, "is_pinned": _is_pinned}

COMPOSITE = (
    DispatchKey.CompositeImplicitAutograd,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
)

_PINNED = weakref.WeakValueDictionary[int, torch.UntypedStorage]()  # by address
_KEPT: list[Library] = []  # what a library has registered ends with it


@functools.cache
def install() -> None:
    """Register the device with torch; idempotent."""
    _setup_privateuseone_for_python_backend(NAME, sys.modules[__name__])
    anything, library = Library("_", "IMPL"), Library("aten", "IMPL")
    _KEPT.extend((anything, library))
    anything.fallback(by_host, "PrivateUse1")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    for name, kernel in CPU_KERNELS.items():
        library.impl(name, kernel, "CPU")
    for view in VIEWS:
        library.impl(schema_name(view), functools.partial(_viewed, view), "PrivateUse1")
    for op in operations_with_kernel("CPU"):
        # torch would prefer what it puts together for a device without a kernel of its own to the fallback.
        if any(map(op.has_kernel_for_dispatch_key, COMPOSITE)) and op not in VIEWS and schema_name(op) not in KERNELS:
            library.impl(schema_name(op), functools.partial(by_host, op), "PrivateUse1")
    composite_kernels.register(library, anything)
    torch.accelerator.synchronize = synchronize
    torch.Event = Event
    torch.UntypedStorage.__new__ = staticmethod(_new_storage)


install()
