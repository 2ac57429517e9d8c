"""Where tensors lie: in memory while there is plenty, then on disk."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.comm.shared_memory import LEAST_BYTES, SharedMemory, SpillAllocator
from paceline.comm.shared_pickle import share

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
    spill = SpillAllocator(roomy_bytes=LEAST_BYTES + 100)
    assert [on_disk(spill.empty(ELEMENTS, torch.float32), folder) for _ in range(3)] == [False, True, True]


def test_small_tensors_stay_in_memory(folder: Path) -> None:
    assert not on_disk(SpillAllocator(roomy_bytes=0).empty(ELEMENTS - 1, torch.float32), folder)


def test_a_tensor_is_kept_as_it_is_while_there_is_room(folder: Path) -> None:
    spill, tensor = SpillAllocator(roomy_bytes=LEAST_BYTES), torch.arange(ELEMENTS, dtype=torch.float32).view(2, -1)
    assert spill.kept(tensor).data_ptr() == tensor.data_ptr()
    second = spill.kept(tensor)
    assert on_disk(second, folder)
    assert torch.equal(second, tensor)


def test_a_segment_is_shared_in_either_place(folder: Path) -> None:
    segments = [SpillAllocator(roomy_bytes).segment("test", LEAST_BYTES) for roomy_bytes in (0, LEAST_BYTES)]
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
        copy = SpillAllocator(roomy_bytes=0).copy(tensor)
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
    spill = SpillAllocator(roomy_bytes=0)
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
        """Says how often its pages were asked for, which is to write them out."""

        @property
        def pages(self) -> mmap.mmap:
            asked.append(self.size_bytes)
            return super().pages

    monkeypatch.setattr("paceline.comm.shared_memory.SharedMemory", Told)
    monkeypatch.setattr("paceline.comm.shared_pickle.PIECE_BYTES", LEAST_BYTES)
    share([torch.randn(ELEMENTS // 4) for _ in range(16)], SpillAllocator(roomy_bytes=0)).close()
    assert len(asked) == 4, "each of four MiB once"
