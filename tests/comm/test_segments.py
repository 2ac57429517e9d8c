import errno
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import linux, liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_memory import Arena, SharedMemory
from paceline.core.errors import PacelineError

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]


def test_a_child_and_main_write_the_same_memory(fork_server: ForkServer) -> None:
    arena = Arena()
    arena.add("first", (5,), torch.uint8)
    arena.add("second", (2, 3), torch.float64)
    segment = SharedMemory.create("test", arena.size_bytes)
    views = arena.tensors(segment)
    views["second"].copy_(torch.arange(6).view(2, 3))
    child = fork_server.spawn("comm_tensor_entries:add_one", {"size_bytes": segment.size_bytes}, [segment.fd])
    assert liveness.wait_gone([child.pidfd], 60)
    assert fork_server.status(child.pid) == "exit code 0"
    assert torch.equal(views["second"], torch.arange(1.0, 7, dtype=torch.float64).view(2, 3))
    assert not views["first"].any()
    segment.close()


def test_memory_is_sparse_until_it_is_reserved() -> None:
    segment = SharedMemory.create("test", 1 << 36)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.reserve(4096, 1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 == 1 << 20
    segment.close()


@pytest.mark.parametrize("size_bytes", [1 << 62, 1 << 70, 0, -1])
def test_an_impossible_size_is_a_clear_error(size_bytes: int) -> None:
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(PacelineError, match=f"{size_bytes:,} bytes of shared memory"):
        SharedMemory.create("test", size_bytes)
    assert os.listdir("/proc/self/fd") == open_before


def test_reserving_more_than_there_is_names_the_bytes_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SharedMemory.create("test", 1 << 45)
    with pytest.raises(PacelineError, match=r"35,184,372,088,832 bytes .* are free.*fewer replicas="):
        segment.reserve(0, 1 << 45)

    def full(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PacelineError, match=r"4,096 bytes .*No space left"):
        segment.reserve(0, 4096)
    segment.close()


def test_what_lies_on_disk_has_room_and_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segment = SharedMemory.on_disk(1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    assert not any(tmp_path.iterdir())
    twin = SharedMemory.attach(os.dup(segment.fd), 1 << 20)
    segment.tensor(64, (4,), torch.int32).fill_(5)
    assert twin.tensor(64, (4,), torch.int32).tolist() == [5] * 4
    segment.close()
    twin.close()


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(fd: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PacelineError, match=r"1,048,576 bytes .*No space left.*TMPDIR"):
        SharedMemory.on_disk(1 << 20)


def test_a_tensor_outlives_its_segment() -> None:
    segment = SharedMemory.create("test", 4096)
    tensor = segment.tensor(64, (4,), torch.float32)
    segment.close()
    segment.close()
    tensor.fill_(3.0)
    assert tensor.sum() == 12
    with pytest.raises(PacelineError, match="closed"):
        segment.tensor(0, (1,), torch.float32)


def test_close_gives_every_descriptor_and_mapping_back() -> None:
    def mapped() -> bool:
        with open("/proc/self/maps") as file:
            return "memfd:paceline:given-back" in file.read()

    before = os.listdir("/proc/self/fd")
    segment = SharedMemory.create("given-back", 4096)
    twin = SharedMemory.attach(os.dup(segment.fd), 4096)
    segment.tensor(0, (4,), torch.int32).fill_(5)
    assert twin.tensor(0, (4,), torch.int32).tolist() == [5] * 4
    assert mapped()
    segment.close()
    twin.close()
    assert os.listdir("/proc/self/fd") == before
    assert not mapped()


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(DTYPES)), max_size=8))
def test_slots_are_aligned_and_apart_and_the_same_everywhere(entries: list[tuple[list[int], torch.dtype]]) -> None:
    arena, again = Arena(), Arena()
    for i, (shape, dtype) in enumerate(entries):
        assert arena.add(str(i), shape, dtype) == again.add(str(i), shape, dtype)
    assert arena == again
    end = 0
    for slot in arena.slots.values():
        assert slot.offset % 64 == 0
        assert slot.offset >= end
        end = slot.offset + slot.size_bytes
    assert arena.size_bytes >= max(end, 1)
    segment = SharedMemory.create("test", arena.size_bytes)
    for i, (name, tensor) in enumerate(arena.tensors(segment).items()):
        assert (tensor.shape, tensor.dtype) == (torch.Size(entries[i][0]), entries[i][1])
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        assert tensor.numel() == prod(arena.slots[name].shape)
    segment.close()


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (os, "memfd_create", lambda: linux.memfd_create("test")),
        (os, "pidfd_open", lambda: linux.pidfd_open(os.getpid())),
    ],
)
def test_calls_that_this_python_lacks_are_made_by_number(
    module: object, name: str, call: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(fd: int) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    expected = link(call())
    monkeypatch.delattr(module, name)
    fd = call()
    assert not os.get_inheritable(fd)
    assert link(fd) == expected


def test_a_failing_call_by_number_raises_as_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ProcessLookupError, match="pidfd_open"):
        linux.pidfd_open(2**22 + 1)  # above any pid


def test_another_system_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(PacelineError, match=r"memfd_create is missing .* write engine='virtual'"):
        SharedMemory.create("test", 64)
