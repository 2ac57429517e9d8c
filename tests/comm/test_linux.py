"""System calls, and the memory that a process may still fill under the limits of its cgroups."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.comm import linux
from paceline.comm.linux import FIRST, SECOND, available_bytes, considerate, left, limited, prompt

MEMORY = """
import ctypes, psutil, torch
from paceline.comm.linux import give_back_freed_memory, keep_freed_memory

class Told(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(10)]

def mapped():  # bytes in blocks with a mapping of their own, which goes back to the system with the block
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return 0
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Told
    return getattr(mallinfo(), "4")

# Nothing is freed between the two: glibc maps fewer blocks after one that was mapped is freed.
before = mapped()
first = torch.ones(1_000_000)
print(mapped() - before)
keep_freed_memory()
before = mapped()
second = torch.ones(1_000_000)
print(mapped() - before)

blocks = [torch.ones(1_000_000) for _ in range(20)]
last = torch.ones(1_000)  # above them in the heap, so that its end can't simply be cut off
del blocks
before = psutil.Process().memory_info().rss
give_back_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.fixture(scope="module")
def memory() -> list[int]:
    """Bytes: of a 4 MB tensor with a mapping of its own, before freed memory is kept and then; of those given back."""
    told = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    return [int(line) for line in told.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory by its own rules")
def test_what_was_freed_can_be_given_back(memory: list[int]) -> None:
    assert memory[2] >= 10 * 4_000_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_come_from_memory_that_is_kept(memory: list[int]) -> None:
    assert memory[0] >= 4_000_000
    assert memory[1] == 0


SLICE = "from paceline.comm import linux; raise SystemExit(linux._scheduling().runtime_ns == 200_000)"
"""A child of somebody with short slices has none."""


def test_slices_are_short_for_as_long_as_asked() -> None:
    before = linux._scheduling()
    with prompt(200_000):
        now = linux._scheduling()
        assert (now is None) == (before is None)  # older kernels know no slices of one's own
        assert now is None or now.runtime_ns == 200_000
        assert now is None or subprocess.run([sys.executable, "-c", SLICE], timeout=60).returncode == 0
    after = linux._scheduling()
    assert after is None or before is None or after._replace(flags=0) == before._replace(flags=0)


def test_nobody_is_interrupted_for_as_long_as_asked() -> None:
    before = os.sched_getscheduler(0)
    with considerate():
        assert os.sched_getscheduler(0) == (os.SCHED_BATCH if before == os.SCHED_OTHER else before)
        with considerate():
            assert os.sched_getscheduler(0) != os.SCHED_OTHER
        assert os.sched_getscheduler(0) != os.SCHED_OTHER
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("names", [FIRST, SECOND])
def test_what_is_used_counts_but_not_what_can_be_taken_back(names: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / names["limit"]).write_text("1000\n")
    (tmp_path / names["used"]).write_text("700\n")
    (tmp_path / "memory.stat").write_text(f"anon 500\n{names['evictable']} 150\n")
    assert left(tmp_path, names) == 1000 - 700 + 150


def test_a_limit_alone_is_all_that_is_left(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    assert left(tmp_path, SECOND) == 1000


def test_without_a_limit_any_amount_is_left(tmp_path: Path) -> None:
    assert left(tmp_path, SECOND) == float("inf")
    (tmp_path / "memory.max").write_text("max\n")
    assert left(tmp_path, SECOND) == float("inf")


def test_groups_of_both_versions_are_found() -> None:
    said = "5:cpu:/\n4:cpuset,memory:/jobs/7\n0::/user/8\n"
    root = Path("/groups")
    assert list(limited(said, root)) == [
        (root / "memory", FIRST),
        (root / "memory/jobs/7", FIRST),
        (root, SECOND),
        (root / "user/8", SECOND),
    ]


def test_something_is_free_here() -> None:
    assert available_bytes() > 0
