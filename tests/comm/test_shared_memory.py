"""Shared memory, tensors in it, and memory that spills to disk."""

import errno
import mmap
import os
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import linux, liveness
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_memory import LEAST_BYTES, Arena, SharedMemory, SpillAllocator
from paceline.comm.shared_pickle import share
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


def test_what_ulimit_forbids_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", forbidden)
    with pytest.raises(PacelineError, match="more than a file of this process may have; write ulimit -f unlimited"):
        SharedMemory.create("big", 1 << 20)


def test_what_lies_on_disk_has_room_and_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segment = SharedMemory.on_disk(1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    assert not any(tmp_path.iterdir())
    twin = SharedMemory(os.dup(segment.fd), 1 << 20)
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
    twin = SharedMemory(os.dup(segment.fd), 4096)
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
        end = slot.offset + prod(slot.shape) * slot.dtype.itemsize
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


ELEMENTS = LEAST_BYTES // 4


def on_disk(tensor: Tensor, folder: Path) -> bool:
    """Whether the memory of a tensor is a file in a folder, by the kernel's account."""
    where = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= where < end:
            return str(folder) in line
    return False


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_is_more_than_was_left_lies_on_disk(folder: Path) -> None:
    spill = SpillAllocator(budget_bytes=LEAST_BYTES + 100)
    assert [on_disk(spill.empty(ELEMENTS, torch.float32), folder) for _ in range(3)] == [False, True, True]


def test_small_tensors_stay_in_memory(folder: Path) -> None:
    assert not on_disk(SpillAllocator(budget_bytes=0).empty(ELEMENTS - 1, torch.float32), folder)


def test_a_tensor_is_kept_as_it_is_while_there_is_room(folder: Path) -> None:
    spill, tensor = SpillAllocator(budget_bytes=LEAST_BYTES), torch.arange(ELEMENTS, dtype=torch.float32).view(2, -1)
    assert spill.kept(tensor).data_ptr() == tensor.data_ptr()
    second = spill.kept(tensor)
    assert on_disk(second, folder)
    assert torch.equal(second, tensor)


def test_a_segment_is_shared_in_either_place(folder: Path) -> None:
    segments = [SpillAllocator(budget_bytes).segment("test", LEAST_BYTES) for budget_bytes in (0, LEAST_BYTES)]
    assert [on_disk(each.tensor(0, (4,), torch.float32), folder) for each in segments] == [True, False]
    for each in segments:
        each.close()


def test_workers_of_a_host_divide_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.shared_memory.available_bytes", lambda: 64 * LEAST_BYTES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    spill = SpillAllocator()
    assert not spill.spills(2 * LEAST_BYTES)
    assert spill.spills(2 * LEAST_BYTES + 1)


def test_what_is_copied_piece_by_piece_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.shared_memory.PIECE_BYTES", LEAST_BYTES // 3)
    rows = torch.randn(7, ELEMENTS // 2, generator=torch.Generator().manual_seed(1))
    for tensor in (rows, rows.T, rows.reshape(-1)):
        copy = SpillAllocator(budget_bytes=0).copy(tensor)
        assert on_disk(copy, folder)
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


def dirty_bytes(tensor: Tensor) -> int:
    """What of its mapping the file behind it does not say yet, by the kernel's account."""
    where, inside, found = tensor.data_ptr(), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= where < end
        elif inside and first.endswith("_Dirty:"):
            found += 1024 * int(rest[0])
    return found


def test_what_is_filled_is_written_out(folder: Path) -> None:
    spill = SpillAllocator(budget_bytes=0)
    first = spill.empty(ELEMENTS, torch.float32).fill_(1)
    assert dirty_bytes(first) >= LEAST_BYTES
    second = spill.empty(ELEMENTS, torch.float32).fill_(2)
    if dirty_bytes(first):
        pytest.skip(f"{folder} lies in memory, where nothing can be written out")
    assert dirty_bytes(second) >= LEAST_BYTES
    spill.settle()
    assert not dirty_bytes(second)
    assert dirty_bytes(spill.copy(second)) == 0, "a copy is written out as it is made"


def test_a_parcel_of_many_small_arrays_is_written_out_on_its_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    class Told(SharedMemory):
        """Counts the accesses to its pages: one for its buffer, others write them out."""

        @property
        def pages(self) -> mmap.mmap:
            asked.append(self.size_bytes)
            return super().pages

    monkeypatch.setattr("paceline.comm.shared_memory.SharedMemory", Told)
    monkeypatch.setattr("paceline.comm.shared_pickle.PIECE_BYTES", LEAST_BYTES)
    share([torch.randn(ELEMENTS // 4) for _ in range(16)], SpillAllocator(budget_bytes=0)).close()
    assert len(asked) == 5, "each of four MiB once, and the buffer"
