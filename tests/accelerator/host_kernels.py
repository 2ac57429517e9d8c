"""Operations of the device ``sim`` by the CPU's kernels, on the same memory; what crosses to the host is counted.

::

    sim tensor --as_host--> CPU tensor --CPU kernel--> CPU tensor --as_sim--> sim tensor
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NAME = "sim"

_CPU, _EXTENSION = 1, 12  # kDLCPU, and kDLExtDev, which torch reads as PrivateUse1
_DEVICE_TYPE_OFFSET = 8  # of DLTensor.device.device_type, behind the pointer to the data

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass
class Copies:
    """What has crossed between host and device since the last reset.

    Args:
        to_host_bytes: of ``.cpu()``, ``.item()``, ``.tolist()``, ``copy_`` into a CPU tensor, ``torch.equal``, ...
        to_host_calls: so many; each makes the host wait for the device.
        to_device_bytes: of ``.to("sim")``, ``torch.tensor(..., device="sim")``, ``copy_`` from a CPU tensor, ...
        to_device_calls: so many.
        collective_bytes: staged on the host by a process group; between real devices they would not touch it.
    """

    to_host_bytes: int = 0
    to_host_calls: int = 0
    to_device_bytes: int = 0
    to_device_calls: int = 0
    collective_bytes: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        vars(self).update(vars(Copies()))

    def to_host(self, size_bytes: int) -> None:
        self.to_host_bytes += size_bytes
        self.to_host_calls += 1

    def to_device(self, size_bytes: int) -> None:
        self.to_device_bytes += size_bytes
        self.to_device_calls += 1


copies = Copies()

generator = torch.Generator()
"""The device's own: like a GPU's it shares no state with the CPU's, and like it ``torch.manual_seed`` seeds it."""


def as_sim(x: Tensor) -> Tensor:
    """Return a tensor on the device with the memory of a CPU tensor."""
    return _seen_on(x, _EXTENSION)


def as_host(x: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of a tensor on the device; a CPU tensor as it is."""
    return x if x.is_cpu else _seen_on(x, _CPU)


def _seen_on(x: Tensor, device_type: int) -> Tensor:
    capsule = torch._C._to_dlpack(x)
    address = _capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET).value = device_type
    return torch._C._from_dlpack(capsule)


@dataclass(frozen=True)
class _Signature:
    """What the schema of an operation says.

    Args:
        tensors: arguments that are one tensor each.
        written: arguments that it writes to.
        outs: those of them that it may resize.
        results: the argument that each result is; None: a new tensor.
        generator: argument that is the generator; None: it takes none.
        draws: whether it draws from the default generator, for want of an argument.
    """

    tensors: frozenset[str]
    written: frozenset[str]
    outs: frozenset[str]
    results: tuple[str | None, ...]
    generator: str | None
    draws: bool


@functools.cache
def _signature(op: OpOverload) -> _Signature:
    arguments, returns = op._schema.arguments, op._schema.returns
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        raise NotImplementedError(f"{op} returns a view; add it to VIEWS of the device {NAME}")
    written = {frozenset(a.alias_info.before_set): a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    takes = next((a.name for a in arguments if "Generator" in str(a.type)), None)
    return _Signature(
        tensors=frozenset(a.name for a in arguments if str(a.type) == "Tensor"),
        written=frozenset(written.values()),
        outs=frozenset(a.name for a in arguments if a.kwarg_only and a.name in written.values()),
        results=tuple(r.alias_info and written[frozenset(r.alias_info.before_set)] for r in returns),
        generator=takes,
        draws=takes is None and torch.Tag.nondeterministic_seeded in op.tags,
    )


def by_host(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation by its CPU kernel.

    Raises:
        RuntimeError: some operands are on the CPU, and a real device would not take them either.
    """
    signature = _signature(op)
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    check_devices(op, named, signature.written)
    on_host = {name: _on_host(value) for name, value in named.items()}
    # The CPU's kernel resizes an empty out=, which it can't do with memory that belongs to another tensor.
    resized = {name for name in signature.outs if isinstance(named[name], Tensor) and not named[name].numel()}
    on_host |= {name: torch.empty(0, dtype=named[name].dtype, device="cpu") for name in resized}
    if signature.generator is not None:
        if on_host.get(signature.generator) is not None:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        on_host[signature.generator] = generator
    with drawing_from_own_generator() if signature.draws else contextlib.nullcontext():
        # A number in place of a tensor ("x % 3") is one until it reaches Python; another overload takes it.
        numbers = any(isinstance(on_host.get(name), (bool, int, float, complex)) for name in signature.tensors)
        result = op.overloadpacket(**on_host) if numbers else op(**on_host)
    for name in resized:
        named[name].set_(as_sim(on_host[name]))
    results = (result,) if len(signature.results) == 1 else result or ()
    back = tuple(named[name] if name else on_device(r) for name, r in zip(signature.results, results, strict=True))
    return back[0] if len(back) == 1 else back or None


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_host(value)
    if isinstance(value, (list, tuple)):
        return [_on_host(each) for each in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def on_device(value: Any) -> Any:
    """Return a result on the device; a number that is one has been copied to the host, and counts."""
    if isinstance(value, Tensor):
        return as_sim(value)
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(each) for each in value)
    if isinstance(value, (bool, int, float, complex)):
        copies.to_host(1 if isinstance(value, bool) else 8)
    return value


@contextlib.contextmanager
def drawing_from_own_generator() -> Iterator[None]:
    """Context manager in which what draws from the CPU's default generator draws from the device's."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


HOST_INDICES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
"""Operations whose indices may be on the CPU, from where CUDA copies them."""


def check_devices(op: OpOverload, named: Mapping[str, Any], written: Iterable[str] = ()) -> None:
    """Raise RuntimeError where operands are on the CPU, unless they are numbers (0-dim, read only), as CUDA does."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            if value.is_cpu and (value.dim() or name in written):
                raise _mixed(op, name)
        elif isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, Tensor) and each.is_cpu:
                    if op._schema.name not in HOST_INDICES:
                        raise _mixed(op, name)
                    copies.to_device(each.nbytes)


def _mixed(op: OpOverload, name: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
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
