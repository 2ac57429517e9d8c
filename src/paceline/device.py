"""Devices: all that Paceline asks of CUDA, XPU, MPS, or of any other accelerator that is registered with torch.

A strategy names a type, ``device=cuda``; a worker computes on one device of it, ``cuda:1``. Here alone is what such
types differ in; everything else is tensors.
"""

import contextlib
import functools
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.errors import InputError

AUTO, CPU = "auto", torch.device("cpu")

# Types whose copies from pinned memory go on while the host does something else.
PINNED: tuple[str, ...] = ("cuda", "xpu")

# Types that have no numbers of 64 bits.
WITHOUT_FLOAT64 = ("mps",)


def accelerator() -> str | None:
    """Return the type of this host's accelerator; None: torch sees none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def resolved(name: str) -> str:
    """Return the type that a strategy's ``device`` stands for: ``auto`` is the accelerator, if there is one."""
    return (accelerator() or CPU.type) if name == AUTO else name


def refuse_absent(name: str) -> None:
    """Raise InputError if this host has no device of a type, or torch knows none."""
    if name == CPU.type:
        return
    here = accelerator()
    instead = f"device={here}, or device=cpu" if here else "device=cpu"
    try:
        known = torch.device(name).type == name
    except RuntimeError:
        known = False
    if not known:
        raise InputError(f"device={name} is no type of device that torch knows; write {instead}")
    if not count(name):
        raise InputError(f"device={name}, but torch sees none here; write {instead}")


def count(kind: str) -> int:
    """Return how many devices of a type this host has."""
    if kind == CPU.type:
        return 1
    try:
        module = _module(kind)
    except RuntimeError:  # torch knows its name, and nothing on this host has registered it
        return 0
    return int(module.device_count()) if module.is_available() else 0


def of_worker(kind: str, number: int) -> torch.device:
    """Return the device of a worker: round robin, so several may have one."""
    return CPU if kind == CPU.type else torch.device(kind, number % count(kind))


def use(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    if device.type != CPU.type and hasattr(module := _module(device.type), "set_device"):
        module.set_device(device.index or 0)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that this process has asked of it."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def seed(number: int, device: torch.device) -> None:
    """Seed torch's generator of the CPU, and that of a device."""
    torch.default_generator.manual_seed(number)
    if device.type != CPU.type:
        module = _module(device.type)
        with module.device(device.index) if device.index else contextlib.nullcontext():
            module.manual_seed(number)


# Threads share torch's generator. A run in one of them restores it at its end, while another makes a model, say. Who
# seeds it and draws from it has this lock meanwhile, unless others are waited for.
GENERATOR = threading.RLock()


@contextlib.contextmanager
def kept_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Context manager: torch's generators of the CPU and of these devices are restored afterwards."""
    kept = contextlib.ExitStack()
    kept.enter_context(torch.random.fork_rng(devices=[]))
    for device in devices:
        if device != CPU:
            kept.enter_context(torch.random.fork_rng(devices=[device.index or 0], device_type=device.type))
    try:
        yield
    finally:
        with GENERATOR:
            kept.close()


@contextlib.contextmanager
def exclusive_generator() -> Iterator[None]:
    """Context manager: torch's generator of the CPU is this thread's alone, and is restored afterwards."""
    with GENERATOR, torch.random.fork_rng(devices=[]):
        yield


@contextlib.contextmanager
def own_generators(tensors: Iterable[Tensor], number: int) -> Iterator[None]:
    """Context manager: torch's generators of the CPU and of these tensors' devices, seeded; restored afterwards."""
    devices = {t.device for t in tensors if t.device.type not in (CPU.type, "meta")}
    with kept_generators(devices):
        for device in (CPU, *devices):
            seed(number, device)
        yield


def seed_draws(number: int) -> None:
    """Seed the generators that data sets draw from: torch's of the CPU, Python's and NumPy's."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextlib.contextmanager
def seeded_draws(number: int) -> Iterator[None]:
    """Context manager: the generators that data sets draw from are this thread's alone, seeded; restored afterwards."""
    with GENERATOR:
        # To exchange NumPy's takes 10 µs, to read its state and write it back 40 times as long.
        numpy: Any = np.random  # its types leave these two functions out
        torchs, pythons, numpys = torch.get_rng_state(), random.getstate(), numpy.get_bit_generator()
        numpy.set_bit_generator(np.random.MT19937(0))
        seed_draws(number)
        try:
            yield
        finally:
            torch.set_rng_state(torchs)
            random.setstate(pythons)
            numpy.set_bit_generator(numpys)


class OwnGenerators(contextlib.AbstractContextManager[None]):
    """Context manager, entered again and again: the generators that data sets draw from, apart from the process's own.

    They are torch's of the CPU, Python's and NumPy's; what is drawn inside continues where the last block ended.
    """

    def __init__(self, number: int) -> None:
        self._others = _generator_states()
        seed_draws(number)
        self._swap()

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *raised: object) -> None:
        self._swap()

    def _swap(self) -> None:
        own, self._others = self._others, _generator_states()
        torch.set_rng_state(own[0])
        random.setstate(own[1])
        np.random.set_state(own[2])


def _generator_states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from the CPU by pinned memory where that has it, so that the host goes on."""
    if tensor.device == device:
        return tensor
    if tensor.device == CPU and device.type in PINNED and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return a vector of tensors of one element, in the widest of their dtypes, where each is exactly itself."""
    dtype = functools.reduce(torch.promote_types, (number.dtype for number in numbers))
    return torch.stack([number.detach().reshape(()).to(dtype) for number in numbers])


class Reached:
    """What a device has been given so far; like a collective it may be waited for.

    Args:
        device: the device, no CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._event.record()

    def is_completed(self) -> bool:
        """Return whether the device has done all of it."""
        return bool(self._event.query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it has, whatever the timeout."""
        del timeout
        self._event.synchronize()
        return True


class Reading(Reached):
    """Numbers that a device computes, on their way to the host, which reads them later and does not wait before.

    What the device is given after these numbers is not waited for.

    Args:
        numbers: tensors of one element, all on one device.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        packed = stacked(numbers)
        host = torch.empty(packed.shape, dtype=packed.dtype)
        self._host = (host.pin_memory() if packed.device.type in PINNED else host).copy_(packed, non_blocking=True)
        super().__init__(packed.device)

    def numbers(self) -> list[float]:
        """Return them; waits."""
        self.wait()
        return [float(number) for number in self._host.tolist()]


def placed(*modules: nn.Module, device: torch.device) -> None:
    """Move modules in place; tensors that they share stay shared, where torch makes new ones of some devices."""
    if device == CPU:
        return
    parts = {part for module in modules for part in module.modules()}
    tables = [table for part in parts for table in (part._parameters, part._buffers)]
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    shared = list[Tensor]()  # alive, so that an id stays that of one tensor
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                places.setdefault(id(tensor), []).append((table, name))
                shared.append(tensor)
    for module in modules:
        module.to(device)
    for (table, name), *others in places.values():
        for other, same in others:
            other[same] = table[name]


def collective_backend(kind: str) -> str:
    """Return the backend of torch.distributed for tensors of a type of device: Gloo, by the host, if it has none."""
    return dist.Backend.default_device_backend_map.get(kind, "gloo")


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)
