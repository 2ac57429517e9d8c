"""Memory of an accelerator that several processes of a host share: one allocates it, the others open it by a handle.

::

    main      allocate(1 GB, cuda:0) -> tensor of bytes, handle --- any way that bytes can go --->  worker
    worker    open(handle) -> a tensor of the same bytes: copies to and from it are the devices' own

No file and no name stands for it. What a process has opened is closed as it ends, however it ends, and the memory is
free once no tensor of the process that allocated it is left.
"""

import ctypes
import functools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.errors import PacelineError

# Longest handle, in bytes.
HANDLE_BYTES = 64


class DeviceMemory(Protocol):
    """How processes share the memory of one type of device."""

    def allocate(self, size_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
        """Allocate memory on a device.

        Returns:
            A tensor of so many bytes (uint8), uninitialised, and its handle, of at most :data:`HANDLE_BYTES`.

        Raises:
            PacelineError: the device has not that much.
        """

    def open(self, handle: bytes, size_bytes: int, device: torch.device) -> Tensor:
        """Return the bytes of another process's handle; ``device`` is the one that they were allocated on."""


class CudaMemory:
    """CUDA's, by IPC handles of its driver.

    ``torch.multiprocessing`` hands tensors over as well, but keeps count in files of who has them: a process that is
    killed never gives its own back, and one that is killed as it has allocated leaves a file behind.
    """

    def allocate(self, size_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
        address, handle = ctypes.c_uint64(), _IpcHandle()
        whole = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        torch.zeros(1, device=device)  # a kernel, before which CUDA makes its context this thread's
        with torch.get_device_module(device.type).device(device.index):
            _driver_call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole), needed=whole)
            memory = _Bytes(address.value, size_bytes, "cuMemFree_v2")
            _driver_call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return torch.as_tensor(memory, device=device), bytes(handle)

    def open(self, handle: bytes, size_bytes: int, device: torch.device) -> Tensor:
        address = ctypes.c_uint64()
        torch.zeros(1, device=device)
        with torch.get_device_module(device.type).device(device.index):
            by_value = _IpcHandle.from_buffer_copy(handle)
            _driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return torch.as_tensor(_Bytes(address.value, size_bytes, "cuIpcCloseMemHandle"), device=device)


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


# The driver may cut smaller allocations from one block, all of which a handle would share.
_BLOCK_BYTES = 2 << 20

# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_LAZY_PEER_ACCESS = 1


class _Bytes:
    """Device memory as torch takes it over (CUDA Array Interface); given back with the last tensor of it."""

    def __init__(self, address: int, size_bytes: int, give_back: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
        weakref.finalize(self, _give_back, give_back, address).atexit = False  # the driver does it for what is left


def _give_back(function: str, address: int) -> None:
    getattr(_driver(), function)(ctypes.c_uint64(address))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _driver_call(function: str, *arguments: Any, needed: int = 0) -> None:
    """Call the driver; raise PacelineError where that fails."""
    result = getattr(_driver(), function)(*arguments)
    if result == 0:
        return
    said = ctypes.c_char_p()
    _driver().cuGetErrorString(result, ctypes.byref(said))
    words = (said.value or b"error %d" % result).decode()
    if needed:
        raise PacelineError(
            f"{needed:,} bytes of the GPU's memory can't be had ({words}); write fewer replicas=, or a smaller model"
        )
    raise PacelineError(f"the GPU's memory can't be shared between processes: {function}: {words}")


# type of device -> how its memory is shared
_KINDS: dict[str, DeviceMemory] = {"cuda": CudaMemory()}


def shared_memory_of(kind: str) -> DeviceMemory | None:
    """Return how the memory of a type of device is shared between processes; None: it is not, as far as is known."""
    return _KINDS.get(kind)


def register(kind: str, memory: DeviceMemory) -> None:
    """Have the memory of a type of device shared so."""
    _KINDS[kind] = memory
