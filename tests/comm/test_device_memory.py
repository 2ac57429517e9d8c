"""Memory of a GPU that processes share: what is asked of CUDA's driver, of which a record stands in here."""

import ctypes
import gc
from typing import Any

import pytest
import torch

from paceline import PacelineError
from paceline.comm import device_memory
from paceline.comm.device_memory import HANDLE_BYTES, CudaMemory, shared_memory_of

ADDRESS = 0x7F0000200000


class Driver:
    """Records calls; the one named ``fails`` has an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls, self._fails = list[tuple[str, tuple[Any, ...]]](), fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorString":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"out of memory"
            elif name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = ADDRESS
            elif name == "cuIpcGetMemHandle":
                ctypes.memmove(arguments[0], bytes(range(HANDLE_BYTES)), HANDLE_BYTES)
            return 2 if name == self._fails else 0

        return call

    @property
    def names(self) -> list[str]:
        """Functions called, in order."""
        return [name for name, _ in self.calls]


class Taken:
    """Stands for the tensor that torch makes of memory with a CUDA Array Interface, which it keeps."""

    def __init__(self, memory: Any, device: torch.device) -> None:
        self.memory, self.device = memory, device
        self.interface = memory.__cuda_array_interface__


class Module:
    """Stands for ``torch.cuda``."""

    class device:  # noqa: N801 (torch's name)
        def __init__(self, index: int) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Driver:
    found = Driver(getattr(request, "param", ""))
    monkeypatch.setattr(device_memory, "_driver", lambda: found)
    monkeypatch.setattr(device_memory.torch, "as_tensor", Taken)
    monkeypatch.setattr(device_memory.torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(device_memory.torch, "get_device_module", lambda _: Module)
    return found


def test_who_allocates_frees_it_with_the_last_tensor(driver: Driver) -> None:
    memory, handle = CudaMemory().allocate(1 << 20, torch.device("cuda", 1))
    taken: Any = memory
    assert taken.interface == {"shape": (1 << 20,), "typestr": "|u1", "data": (ADDRESS, False), "version": 2}
    assert taken.device == torch.device("cuda", 1)
    assert handle == bytes(range(HANDLE_BYTES))
    assert driver.names == ["cuMemAlloc_v2", "cuIpcGetMemHandle"]
    assert driver.calls[0][1][1].value == 2 << 20  # a block of its own
    assert driver.calls[1][1][1].value == ADDRESS
    del memory, taken
    gc.collect()
    name, [address] = driver.calls[-1]
    assert (name, address.value) == ("cuMemFree_v2", ADDRESS)


def test_who_opens_it_closes_it_with_the_last_tensor(driver: Driver) -> None:
    exported = bytes(reversed(range(HANDLE_BYTES)))
    memory = CudaMemory().open(exported, 64, torch.device("cuda", 0))
    name, (_, handle, flags) = driver.calls[0]
    assert (name, bytes(handle), flags.value) == ("cuIpcOpenMemHandle_v2", exported, 1)
    del memory
    gc.collect()
    name, [address] = driver.calls[-1]
    assert (name, address.value) == ("cuIpcCloseMemHandle", ADDRESS)


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("cuMemAlloc_v2", r"2,097,152 bytes of the GPU's memory can't be had \(out of memory\); write fewer replicas="),
        ("cuIpcGetMemHandle", "can't be shared between processes: cuIpcGetMemHandle: out of memory"),
    ],
    indirect=["driver"],
)
def test_what_fails_is_said(driver: Driver, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        CudaMemory().allocate(1 << 20, torch.device("cuda", 0))
    if driver._fails != "cuMemAlloc_v2":
        gc.collect()
        assert driver.names[-1] == "cuMemFree_v2"  # nothing stays behind


def test_a_type_of_device_that_nobody_shares() -> None:
    assert shared_memory_of("xpu") is None
