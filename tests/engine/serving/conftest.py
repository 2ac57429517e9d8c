"""Servers that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving.serving_cases import Script, Served


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    """Starts a server of the small model."""
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)

    def begin(strategy: str = "replicas=1..3 aggregation=asynchronous", make: str = "sgd", **settings: Any) -> Served:
        return Served(tmp_path, strategy, settings, make)

    return begin


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    """Starts scripts, which end with the test."""
    started = list[Script]()

    def begin(what: str) -> Script:
        started.append(Script(tmp_path, what))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
