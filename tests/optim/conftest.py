"""One fork server for the whole folder."""

from collections.abc import Iterator

import pytest

from paceline.engine.local.engine import LocalEngine


@pytest.fixture(scope="session")
def engine() -> Iterator[LocalEngine]:
    """Shared by tests that leave it running."""
    with LocalEngine() as engine:
        yield engine
