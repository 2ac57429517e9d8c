"""The simulated accelerator in Python: results with the bits of the CPU's, copies that count, refusals.

The cases of a module run in one process, which has the device; see ``running.py``.
"""

import pytest
import torch

from paceline.comm.fork_server import ForkServer
from tests.accelerator import model_cases, operation_cases, running, traffic_cases

MODULES = (model_cases, operation_cases, traffic_cases)


@pytest.fixture(scope="module")
def outcomes(session_fork_server: ForkServer) -> dict[str, str | None]:
    """The traceback of each case, or None."""
    outcomes = dict[str, str | None]()
    for cases in MODULES:
        outcomes |= running.run(session_fork_server, "tests.accelerator.running:outcomes", module=cases.__name__)
    return outcomes


NOT_ON_CPU = "could not create a primitive descriptor for the LSTM"
"""What oneDNN says of bfloat16 on processors without instructions for it."""


def assert_passed(outcomes: dict[str, str | None], case: str) -> None:
    """Fail with a case's traceback; skip it where this processor can't compute what the device's is compared with."""
    failure = outcomes[case]
    if failure is not None and case == "autocast_lstm" and NOT_ON_CPU in failure:
        pytest.skip("this processor has no LSTM in bfloat16, which the device's is compared with")
    assert failure is None, failure


@pytest.mark.parametrize("case", [case.__name__ for cases in MODULES for case in cases.CASES])
def test_does_as_an_accelerator_does_with_the_bits_of_the_cpu(outcomes: dict[str, str | None], case: str) -> None:
    assert_passed(outcomes, case)


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("case_that_raises", "ZeroDivisionError"),
        ("case_that_dies", "exit code 7"),
        ("case_of_no_name", "AttributeError"),
    ],
)
def test_a_failure_is_raised_where_it_was_asked_for(fork_server: ForkServer, target: str, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        running.run(fork_server, f"tests.accelerator.failing_cases:{target}")


def test_a_fork_of_a_process_with_the_device_has_it(fork_server: ForkServer) -> None:
    assert running.run(fork_server, "tests.accelerator.operation_cases:forks") == 0


def test_the_process_of_pytest_has_no_such_device() -> None:
    assert not hasattr(torch, "sim")
