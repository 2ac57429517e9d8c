"""Where tensors lie: in memory while there is plenty, then on disk."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.comm.spill import LEAST_BYTES, Spill

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
    spill = Spill(roomy_bytes=LEAST_BYTES + 100)
    assert [on_disk(spill.empty(ELEMENTS, torch.float32), folder) for _ in range(3)] == [False, True, True]


def test_small_tensors_stay_in_memory(folder: Path) -> None:
    assert not on_disk(Spill(roomy_bytes=0).empty(ELEMENTS - 1, torch.float32), folder)


def test_a_tensor_is_kept_as_it_is_while_there_is_room(folder: Path) -> None:
    spill, tensor = Spill(roomy_bytes=LEAST_BYTES), torch.arange(ELEMENTS, dtype=torch.float32).view(2, -1)
    assert spill.kept(tensor).data_ptr() == tensor.data_ptr()
    second = spill.kept(tensor)
    assert on_disk(second, folder)
    assert torch.equal(second, tensor)


def test_a_segment_is_shared_in_either_place(folder: Path) -> None:
    segments = [Spill(roomy_bytes).segment("test", LEAST_BYTES) for roomy_bytes in (0, LEAST_BYTES)]
    assert [on_disk(each.tensor(0, (4,), torch.float32), folder) for each in segments] == [True, False]
    for each in segments:
        each.close()


def test_workers_of_a_host_divide_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.spill.available_bytes", lambda: 64 * LEAST_BYTES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    spill = Spill()
    assert not spill.spills(2 * LEAST_BYTES)
    assert spill.spills(2 * LEAST_BYTES + 1)
