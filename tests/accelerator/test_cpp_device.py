"""The simulated accelerator in C++: all that the one in Python does, two devices, memory, and copies that are late."""

from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.comm.fork_server import ForkServer
from tests.accelerator import building, cpp_cases, group_cases, model_cases, operation_cases, running, traffic_cases
from tests.accelerator.target import Target
from tests.accelerator.test_engines import assert_batches_alone
from tests.accelerator.test_python_device import assert_passed

MODULES = (cpp_cases, model_cases, operation_cases, traffic_cases)


@pytest.fixture(scope="module")
def outcomes(session_fork_server: ForkServer) -> dict[str, str | None]:
    """The traceback of each case, or None."""
    if why := building.missing():
        pytest.skip(why)
    outcomes = dict[str, str | None]()
    for cases in MODULES:
        outcomes |= running.run(
            session_fork_server, "tests.accelerator.running:outcomes", device=running.CPP, module=cases.__name__
        )
    return outcomes


@pytest.mark.parametrize("case", [case.__name__ for cases in MODULES for case in cases.CASES])
def test_does_as_an_accelerator_does_with_the_bits_of_the_cpu(outcomes: dict[str, str | None], case: str) -> None:
    assert_passed(outcomes, case)


@pytest.mark.parametrize("which", ["virtual", "distributed:gloo"])
def test_losses_are_read_once_they_are_there(session_fork_server: ForkServer, tmp_path: Path, which: str) -> None:
    """Until somebody has waited for one, it is NaN on the host, and the run would end."""
    if why := building.missing():
        pytest.skip(why)
    cases, words = "tests.accelerator.late_cases:alone", {"engine": which, "kind": "sim", "folder": str(tmp_path)}
    outcomes = running.run(session_fork_server, cases, device=running.CPP, **words)
    assert not any(outcomes.values()), outcomes


def test_ranks_with_a_device_each(session_fork_server: ForkServer, tmp_path: Path) -> None:
    if why := building.missing():
        pytest.skip(why)
    for outcomes in group_cases.ranks(session_fork_server, tmp_path / "store", "simshm", device=running.CPP):
        assert not any(outcomes.values()), outcomes


def test_worker_processes_with_a_device_each(session_fork_server: ForkServer, tmp_path: Path) -> None:
    """A is on the first; what the replica on the second reads and writes goes from device to device."""
    if why := building.missing():
        pytest.skip(why)
    on = asdict(Target("sim", running.CPP))
    found = running.run(session_fork_server, "tests.accelerator.local_cases:differences", device=running.CPP, on=on)
    assert not any(found.values()), found
    cases = "tests.accelerator.local_cases:copied"
    outcomes = running.run(session_fork_server, cases, device=running.CPP, on=on, folder=str(tmp_path))
    assert_batches_alone(outcomes)
