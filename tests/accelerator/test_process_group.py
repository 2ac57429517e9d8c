"""Process groups for tensors on the simulated accelerator, in two processes, which have it."""

import pytest

from paceline.comm.fork_server import ForkServer
from tests.accelerator import group_cases

BACKENDS = ("simshm", "simshm_cpu")

Outcomes = dict[str, list[dict[str, str | None]]]


@pytest.fixture(scope="module")
def outcomes(session_fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By the backend, and then for each rank: the traceback of each case, or None."""
    folder = tmp_path_factory.mktemp("stores")
    return {backend: group_cases.ranks(session_fork_server, folder / backend, backend) for backend in BACKENDS}


@pytest.mark.parametrize("case", [case.__name__ for case in group_cases.CASES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_a_device_each(outcomes: Outcomes, backend: str, case: str) -> None:
    found = [outcome[case] for outcome in outcomes[backend]]
    assert found == [None, None], "\n".join(map(str, found))
