"""Operations that torch puts together in one way on a CPU and in another on accelerators: here as on the CPU.

Attention takes a flash kernel, and recurrent layers those of oneDNN, only where tensors are on the CPU; put together as
for an accelerator, their results would differ in the last bits. Autocast has a list of operations for each type of
device, and the one here is the CPU's; but it casts a parameter anew for each use, where torch keeps what it has cast.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.accelerator import device_module
from tests.accelerator.device_module import NAME, as_host
from tests.accelerator.host_kernels import as_sim, device_of, operations_with_kernel, schema_name

aten = torch.ops.aten

AS_ON_THE_CPU: tuple[OpOverload, ...] = (
    aten.scaled_dot_product_attention.default,
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
)

LOWER_PRECISION = {
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "matmul", "linalg_vecdot", "prelu", "conv_tbc"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "_addmm_activation"),
    *("scaled_dot_product_attention", "_native_multi_head_attention", "mkldnn_rnn_layer", "_convolution"),
}
"""Those that the CPU's autocast has in the lower precision."""

WIDEST = {"stack", "cat", "index_copy"}
"""Those that it has in the widest dtype of their operands; all others it has in float32."""


def register(library: Library, autocast: Library) -> None:
    """Register them for the device: in a library of ``aten``, and in one of fallbacks."""
    autocast.fallback(fallthrough_kernel, "AutocastPrivateUse1")
    kernels = {op: functools.partial(_as_on_the_cpu, op) for op in AS_ON_THE_CPU} | {aten.dropout.default: _dropout}
    for op, kernel in kernels.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the second one under torch.inference_mode
            library.impl(schema_name(op), kernel, key)
    for op in operations_with_kernel("AutocastCPU"):
        library.impl(schema_name(op), functools.partial(_autocast, op, _dtype_of(op)), "AutocastPrivateUse1")


# ---------------------------------------------------------------------------------------- one node of autograd for each


def _as_on_the_cpu(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    # Fake tensors, other subclasses and torch.func's wrappers have no memory: for them it is made of other operations.
    if any(
        type(x) not in (Tensor, nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors
    ):
        return op.decompose(*args, **kwargs)
    device = device_of(op, _named(op, args, kwargs))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        results = _ByHost.apply(op, device, spec, *flat)
    else:
        on_host = [as_host(x) if isinstance(x, Tensor) else x for x in flat]
        results = [as_sim(x, device) for x in _run(op, device, spec, on_host)]
    return results[0] if len(op._schema.returns) == 1 else tuple(results)


def _named(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs


def _run(op: OpOverload, device: torch.device, spec: Any, flat: list[Any]) -> tuple[Tensor, ...]:
    device_module.hardware.launch()
    args, kwargs = tree_unflatten(flat, spec)
    lower = torch.autocast("cpu", torch.get_autocast_dtype(NAME), torch.is_autocast_enabled(NAME))
    named = _named(op, args, kwargs)
    draws = named.get("dropout_p") or named.get("dropout")
    with device_module.in_place_of_default(device) if draws else contextlib.nullcontext(), lower:
        results = op(*args, **kwargs)
    return (results,) if isinstance(results, Tensor) else results


class _ByHost(torch.autograd.Function):
    """An operation and its gradient by the CPU's autograd, on the same memory."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, device: torch.device, spec: Any, *flat: Any) -> tuple[Tensor, ...]:
        inputs = [as_host(x.detach()) if isinstance(x, Tensor) else x for x in flat]
        ctx.device = device
        ctx.needs = [isinstance(x, Tensor) and x.requires_grad for x in flat]
        ctx.inputs = [x.requires_grad_() for x, need in zip(inputs, ctx.needs, strict=True) if need]
        with torch.enable_grad():
            ctx.results = _run(op, device, spec, inputs)
        return tuple(as_sim(x.detach(), device) for x in ctx.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        on_host = [as_host(grad) for grad in grads]
        # The graph is kept: torch's own nodes may be run again as well.
        found = iter(torch.autograd.grad(ctx.results, ctx.inputs, on_host, retain_graph=True, allow_unused=True))
        own = (next(found) if need else None for need in ctx.needs)
        return (None, None, None, *(None if grad is None else as_sim(grad, ctx.device) for grad in own))


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    # An accelerator's fused kernel rounds to a lower precision once, the CPU's scaled noise twice.
    if not train or p == 0.0 or x.numel() == 0:
        return x
    if p == 1.0:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    return x * torch.empty_like(x).bernoulli_(1.0 - p).div_(1.0 - p)


# ------------------------------------------------------------------------------------------------------------ autocast


def _dtype_of(op: OpOverload) -> Callable[[list[Tensor]], torch.dtype]:
    base = op._schema.name.removeprefix("aten::")
    if base in LOWER_PRECISION:
        return lambda tensors: torch.get_autocast_dtype(NAME)
    if base in WIDEST:
        return lambda tensors: functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return lambda tensors: torch.float32


def _autocast(op: OpOverload, target: Callable[[list[Tensor]], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and _is_cast(x)]
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)):
        if tensors:
            dtype = target(tensors)
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x) else x, (args, kwargs))
        return op(*args, **kwargs)


def _is_cast(x: Tensor) -> bool:
    return x.device.type == NAME and x.is_floating_point() and x.dtype is not torch.float64
