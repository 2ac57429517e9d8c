"""Memory of the simulated device that processes share: :mod:`paceline.comm.device_memory` over shared memory."""

import os
import struct
import weakref

import torch
from torch import Tensor

from paceline.comm.shared_memory import SharedMemory
from tests.accelerator.device_module import alias_on_device

_HANDLE = struct.Struct("=qq")


class SimulatedMemory:
    """Each handle is a process and its file descriptor, which is open as long as a tensor of it lives there."""

    def allocate(self, size_bytes: int, device: torch.device) -> tuple[Tensor, bytes]:
        segment = SharedMemory.create(str(device), size_bytes)
        weakref.finalize(segment.pages, os.close, segment.fd).atexit = False
        memory = alias_on_device(segment.tensor(0, (size_bytes,), torch.uint8), device)
        memory.fill_(255)  # NaNs: real memory is not zero
        return memory, _HANDLE.pack(os.getpid(), segment.fd)

    def open(self, handle: bytes, size_bytes: int, device: torch.device) -> Tensor:
        process, fd = _HANDLE.unpack_from(handle)
        segment = SharedMemory(os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR), size_bytes)
        memory = alias_on_device(segment.tensor(0, (size_bytes,), torch.uint8), device)
        segment.close()
        return memory
