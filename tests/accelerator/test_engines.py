"""Each engine × form × policy on the simulated accelerator: the CPU's bits, and nothing of A, Δ or optimizer copied."""

from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer
from tests import ranks
from tests.accelerator import running
from tests.accelerator.engine_cases import BATCH_BYTES
from tests.engine.distributed_cases import kept

SCRIPT = Path(__file__).with_name("engines_script.py")

SMALL_BYTES = 64
"""Of a step's loss, whether Δ is finite, and its norm where that is clipped, 8 for each; and of ranks' numbers."""

STATUS_BYTES = 72
"""Of what each rank tells the others with its Δ: nine numbers."""

ROUNDING = 1e-15
"""The norm of a Δ whose elements several workers have is a sum of theirs, which may end in another last digit."""


@pytest.mark.parametrize("which", ["virtual", "distributed:gloo"])
def test_one_process(session_fork_server: ForkServer, which: str) -> None:
    outcomes = running.run(session_fork_server, "tests.accelerator.engine_cases:alone", engine=which)
    for name, (difference, to_host, to_device) in outcomes.items():
        assert difference == 0.0, name
        # A loop of virtual time makes the steps of all replicas in turn, so a step may see those of several.
        steps = 3 if "replicas=3" in name else 1
        assert 0 < to_host <= steps * SMALL_BYTES, name
        assert 0 < to_device <= steps * (BATCH_BYTES + SMALL_BYTES), name


@pytest.mark.parametrize(("size", "backend"), [(2, "simshm_cpu"), (2, "gloo"), (4, "simshm_cpu")])
def test_several_processes(play: ranks.Play, tmp_path: Path, size: int, backend: str) -> None:
    """By a backend for the device, and by one that goes through the host's memory."""
    play(SCRIPT, backend, size=size, folder=tmp_path)
    for outcomes in kept(tmp_path, "outcomes", size):
        for name, (difference, to_host, to_device) in outcomes.items():
            assert difference <= (ROUNDING if "clipped" in name else 0.0), name
            if backend != "gloo":
                small = SMALL_BYTES + STATUS_BYTES * size
                assert to_host <= small, name
                assert to_device <= BATCH_BYTES + small, name


def test_worker_processes(session_fork_server: ForkServer) -> None:
    """A is in memory of the host that all share, so parameters and Δs are copied."""
    found = running.run(session_fork_server, "tests.accelerator.local_cases:differences")
    assert set(found.values()) == {0.0}, found
