"""The device under test, and modules that install one, which must not be imported into pytest's own process."""

import pytest
import torch

from tests.accelerator.target import Target, of_option

collect_ignore = ["cpp_device.py", "process_group.py", "python_device.py", "real_device.py"]


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """What ``--device`` names; skips where there is none."""
    option = request.config.getoption("--device")
    found = of_option(option)
    if found is None:
        pytest.skip(f"--device {option}: torch {torch.__version__} sees no such accelerator on this host")
    return found


@pytest.fixture
def real(target: Target) -> Target:
    """A device of this host; skips on the simulated one."""
    if target.simulated:
        pytest.skip("the simulated accelerator has nothing of it; write --device auto")
    return target
