"""What is asked of the system, and what it then does."""

import subprocess
import sys

import pytest

from paceline.comm import kernel
from paceline.comm.kernel import prompt

CHURN = """
import resource, sys, torch
from paceline.comm.kernel import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
torch.set_num_threads(1)
def churn():
    for _ in range(20):
        blocks = [torch.ones(elements) for elements in 3 * (30_000, 600_000, 3_000_000, 30_000)]
        del blocks
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


SLICE = "from paceline.comm import kernel; raise SystemExit(kernel._scheduling().runtime_ns == 200_000)"
"""A child of somebody with short slices has none."""


def faults(how: str) -> int:
    """Page faults of a process that allocates and frees the same blocks again and again."""
    told = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    return int(told.stdout)


@pytest.mark.skipif(kernel.platform.libc_ver()[0] != "glibc", reason="another C library")
def test_kept_memory_is_not_paid_for_again() -> None:
    """44 MB are 10,000 pages, 20 times: what is left is chance."""
    assert faults("keep") < 1000 < faults("give back")


def test_slices_are_short_for_as_long_as_asked() -> None:
    before = kernel._scheduling()
    with prompt(200_000):
        now = kernel._scheduling()
        assert (now is None) == (before is None)  # older kernels know no slices of one's own
        assert now is None or now.runtime_ns == 200_000
        assert now is None or subprocess.run([sys.executable, "-c", SLICE], timeout=60).returncode == 0
    after = kernel._scheduling()
    assert after is None or before is None or after._replace(flags=0) == before._replace(flags=0)
