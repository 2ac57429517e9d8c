"""Operations of the device ``sim`` by the CPU's kernels, on the same memory; what crosses to the host is counted.

::

    sim tensor --as_host--> CPU tensor --CPU kernel--> CPU tensor --as_sim--> sim tensor
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.accelerator import device_module
from tests.accelerator.device_module import NAME, as_host, copies


def as_sim(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device with the values of a CPU tensor that nobody else uses."""
    return device_module.hardware.place(x, device)


@dataclass(frozen=True)
class _Signature:
    """What the schema of an operation says.

    Args:
        tensors: arguments that are one tensor each.
        written: arguments that it writes to.
        outs: those of them that it may resize.
        results: the argument that each result is; None: a new tensor.
        generator: argument that is the generator; "": it takes none.
        draws: whether it draws from the default generator, for want of an argument.
    """

    tensors: frozenset[str]
    written: frozenset[str]
    outs: frozenset[str]
    results: tuple[str | None, ...]
    generator: str
    draws: bool


@functools.cache
def _signature(op: OpOverload) -> _Signature:
    arguments, returns = op._schema.arguments, op._schema.returns
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        raise NotImplementedError(f"{op} returns a view; add it to VIEWS of the device {NAME}")
    written = {frozenset(a.alias_info.before_set): a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    takes = next((a.name for a in arguments if "Generator" in str(a.type)), "")
    return _Signature(
        tensors=frozenset(a.name for a in arguments if str(a.type) == "Tensor"),
        written=frozenset(written.values()),
        outs=frozenset(a.name for a in arguments if a.kwarg_only and a.name in written.values()),
        results=tuple(r.alias_info and written[frozenset(r.alias_info.before_set)] for r in returns),
        generator=takes,
        draws=not takes and torch.Tag.nondeterministic_seeded in op.tags,
    )


def by_host(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation by its CPU kernel.

    Raises:
        RuntimeError: some operands are on the CPU, and a real device would not take them either.
    """
    signature = _signature(op)
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    device = device_of(op, named, signature.written)
    device_module.hardware.launch()
    on_host = {name: _on_host(value) for name, value in named.items()}
    # The CPU's kernel resizes an empty out=, which it can't do with memory that belongs to another tensor.
    resized = {name for name in signature.outs if isinstance(named[name], Tensor) and not named[name].numel()}
    on_host |= {name: torch.empty(0, dtype=named[name].dtype, device="cpu") for name in resized}
    result = _run(op, signature, on_host, device, named.get(signature.generator))
    for name in resized:
        named[name].set_(as_sim(on_host[name], device))
    results = (result,) if len(signature.results) == 1 else result or ()
    names = zip(signature.results, results, strict=True)
    back = tuple(named[name] if name else on_device(result, device) for name, result in names)
    return back[0] if len(back) == 1 else back or None


def _run(
    op: OpOverload, signature: _Signature, on_host: dict[str, Any], device: torch.device, given: torch.Generator | None
) -> Any:
    # A number in place of a tensor ("x % 3") is one until it reaches Python; another overload takes it.
    numbers = any(isinstance(on_host.get(name), (bool, int, float, complex)) for name in signature.tensors)
    function = op.overloadpacket if numbers else op
    if signature.generator:
        with device_module.host_generator(device, given) as generator:
            return function(**on_host | {signature.generator: generator})
    with device_module.in_place_of_default(device) if signature.draws else contextlib.nullcontext():
        return function(**on_host)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_host(value)
    if isinstance(value, (list, tuple)):
        return [_on_host(each) for each in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def on_device(value: Any, device: torch.device) -> Any:
    """Return a result on a device; a number that is one has been copied to the host, and counts."""
    if isinstance(value, Tensor):
        return as_sim(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(each, device) for each in value)
    if isinstance(value, (bool, int, float, complex)):
        copies.to_host(1 if isinstance(value, bool) else 8)
    return value


HOST_INDICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
"""Operations whose indices may be on the CPU, from where CUDA copies them."""


def device_of(op: OpOverload, named: Mapping[str, Any], written: Iterable[str] = ()) -> torch.device:
    """Return the device of an operation.

    Raises:
        RuntimeError: operands are on several, or on the CPU and neither numbers (0-dim) nor only read, as by CUDA.
    """
    found: torch.device | None = None
    for name, value in named.items():
        several = isinstance(value, (list, tuple))
        for each in value if several else (value,):
            if isinstance(each, Tensor) and each.is_cpu:
                if several and op._schema.name in HOST_INDICES:
                    copies.to_device(each.nbytes)
                elif several or each.dim() or name in written:
                    raise _mixed(op, name, found or f"{NAME}:0", each.device)
            elif isinstance(each, (Tensor, torch.device)):
                device = each.device if isinstance(each, Tensor) else each
                if found is not None and found != device:
                    raise _mixed(op, name, found, device)
                found = device
    return found or torch.device(NAME, device_module.current_device())


def _mixed(op: OpOverload, name: str, first: Any, second: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when checking argument {name} of {op})"
    )


def operations_with_kernel(key: str) -> Iterator[OpOverload]:
    """Yield the operations of torch that have a kernel of their own under a dispatch key."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            base, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, base), overload or "default")


def schema_name(op: OpOverload) -> str:
    """Return the name by which a library registers an operation."""
    return op.name().removeprefix("aten::")
