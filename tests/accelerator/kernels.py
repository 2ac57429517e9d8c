"""Kernels that every simulated device registers with torch, whatever its memory is."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library

from tests.accelerator import composite_kernels
from tests.accelerator.device_module import as_host, copies, hardware
from tests.accelerator.host_kernels import by_host, operations_with_kernel, schema_name

aten = torch.ops.aten

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


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if target.is_cpu:
        copies.to_host(target.nbytes, blocks=not (non_blocking and target.is_pinned()))
    elif source.is_cpu:
        copies.to_device(target.nbytes, blocks=not (non_blocking and source.is_pinned()))
    hardware.launch()
    as_host(target).copy_(as_host(source))
    return target


def copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return copy_from(source, target.resize_(source.shape))


def foreach_copy(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each, from whichever device: the one operation of which CUDA takes lists on two devices."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def local_scalar_dense(x: Tensor) -> Any:
    copies.to_host(x.element_size())
    hardware.launch()
    return as_host(x).item()


def record_stream(x: Tensor, stream: torch.Stream) -> None:
    pass


def convolution(*args: Any) -> Tensor:
    return by_host(aten.convolution.default, *args)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    *geometry, mask = others
    return by_host(aten.convolution_backward.default, grad, x, weight, [grad.shape[1]], *geometry, mask)


KERNELS: dict[str, Any] = {
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_foreach_copy_": foreach_copy,
    "record_stream": record_stream,
    "_local_scalar_dense": local_scalar_dense,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
}

COMPOSITE = (
    DispatchKey.CompositeImplicitAutograd,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
)


_KEPT: list[Library] = []  # what a library has registered ends with it


def register(own: dict[str, Any]) -> None:
    """Register all, and a device's own ones by the names of their operations, for the life of the process."""
    anything, library = Library("_", "IMPL"), Library("aten", "IMPL")
    _KEPT.extend((anything, library))
    anything.fallback(by_host, "PrivateUse1")
    for name, kernel in (KERNELS | own).items():
        library.impl(name, kernel, "PrivateUse1")
    for view in VIEWS:
        library.impl(schema_name(view), functools.partial(_viewed, view), "PrivateUse1")
    for op in operations_with_kernel("CPU"):
        # torch would prefer what it puts together for a device without a kernel of its own to the fallback.
        put_together = any(map(op.has_kernel_for_dispatch_key, COMPOSITE))
        if put_together and op not in VIEWS and schema_name(op) not in KERNELS | own:
            library.impl(schema_name(op), functools.partial(by_host, op), "PrivateUse1")
    composite_kernels.register(library, anything)
