"""What torch asks the module of a device for (it is ``torch.sim``), and what the simulated devices have in common.

Random numbers come from a generator for each device: like a GPU's they share no state with the CPU's, and like these
``torch.manual_seed`` seeds them. Each draws what the CPU's would from the same state.
"""

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "sim"


@dataclass
class Copies:
    """What has crossed between host and device since the last reset.

    Args:
        to_host_bytes: of ``.cpu()``, ``.item()``, ``.tolist()``, ``copy_`` into a CPU tensor, ``torch.equal``, ...
        to_host_calls: so many.
        to_device_bytes: of ``.to("sim")``, ``torch.tensor(..., device="sim")``, ``copy_`` from a CPU tensor, ...
        to_device_calls: so many.
        polls: questions of the host whether a collective on the device, or a message to it, is complete.
        waits: calls in which the host waited for all that the device had been given: of all of the above but those that
            do not block, from and to pinned memory, and for the event that was recorded last.
        collective_bytes: staged on the host by a process group; between real devices they would not touch it.
    """

    to_host_bytes: int = 0
    to_host_calls: int = 0
    to_device_bytes: int = 0
    to_device_calls: int = 0
    waits: int = 0
    polls: int = 0
    collective_bytes: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        vars(self).update(vars(Copies()))

    def to_host(self, size_bytes: int, *, blocks: bool = True) -> None:
        self.to_host_bytes += size_bytes
        self.to_host_calls += 1
        self.waits += blocks

    def to_device(self, size_bytes: int, *, blocks: bool = True) -> None:
        self.to_device_bytes += size_bytes
        self.to_device_calls += 1
        self.waits += blocks


copies = Copies()


# --------------------------------------------------------------------------------------------------------------- memory

_CPU, _EXTENSION = 1, 12  # kDLCPU, and kDLExtDev, which torch reads as PrivateUse1
_DEVICE_TYPE_OFFSET = 8  # of DLTensor.device.device_type, behind the pointer to the data

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def alias_on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device with the memory of a CPU tensor."""
    return _seen_on(x, _EXTENSION, device.index or 0)


def as_host(x: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of a tensor on the device; a CPU tensor as it is."""
    return x if x.is_cpu else _seen_on(x, _CPU, 0)


def _seen_on(x: Tensor, device_type: int, index: int) -> Tensor:
    capsule = torch._C._to_dlpack(x)
    address = _capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET).value = device_type
    ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET + 4).value = index
    return torch._C._from_dlpack(capsule)


@dataclass
class Hardware:
    """What differs between simulated devices.

    Args:
        devices: how many there are.
        place: returns a tensor on a device with the values of a CPU tensor that nobody else uses.
        launch: is called before anything reads or writes memory of the device.
    """

    devices: int = 1
    place: Callable[[Tensor, torch.device], Tensor] = alias_on_device
    launch: Callable[[], None] = lambda: None


hardware = Hardware()

# -------------------------------------------------------------------------------------------------- devices and streams

_initialized = True  # what torch.utils.checkpoint asks for


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return hardware.devices


current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
current_stream = torch.accelerator.current_stream


class device(torch.accelerator.device_index):  # noqa: N801 (torch's name)
    """Context manager in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        super().__init__(device if device is None or isinstance(device, int) else torch.device(device).index)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def Stream(device: Any = NAME, priority: int = 0) -> torch.Stream:  # noqa: N802 (torch's name)
    return torch.Stream(device, priority=priority)


def Event(device: Any = NAME, **options: Any) -> torch.Event:  # noqa: N802 (torch's name)
    return torch.Event(device, **options)


def stream(new: torch.Stream | None) -> Any:
    return contextlib.nullcontext() if new is None else new


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ------------------------------------------------------------------------------------------------------- random numbers

_own = defaultdict[int, torch.Generator](torch.Generator)


def _of(device: Any) -> torch.Generator:
    index = device if isinstance(device, int) else torch.device(device).index
    return _own[current_device() if index is None else index]


@contextlib.contextmanager
def host_generator(device: torch.device, given: torch.Generator | None) -> Iterator[torch.Generator]:
    """Context manager: a CPU generator from which a kernel draws in place of the device's, or of one that is given.

    Raises:
        RuntimeError: the given one is the CPU's.
    """
    if given is None:
        yield _of(device)
        return
    if given.device.type != NAME:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{given.device.type}'")
    twin = torch.Generator()
    twin.set_state(given.get_state())
    yield twin
    given.set_state(twin.get_state())


@contextlib.contextmanager
def in_place_of_default(device: torch.device) -> Iterator[None]:
    """Context manager in which what draws from the CPU's default generator draws from the device's."""
    generator, before = _of(device), torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _all_devices() -> range:
    return range(device_count())


def manual_seed(seed: int) -> None:
    _of(NAME).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in _all_devices():
        _of(index).manual_seed(seed)


def seed() -> None:
    _of(NAME).seed()


def seed_all() -> None:
    manual_seed_all(_of(0).seed())


def initial_seed() -> int:
    return _of(NAME).initial_seed()


def get_rng_state(device: Any = NAME) -> Tensor:
    return _of(device).get_state()


def set_rng_state(new_state: Tensor, device: Any = NAME) -> None:
    _of(device).set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in _all_devices()]


def set_rng_state_all(new_states: list[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
