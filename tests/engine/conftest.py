"""What tests of every engine share."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.base import Watcher


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watcher]:
    """Put one in, and it is told how the next run stands; it is called in main."""
    watchers: list[Watcher] = []

    @contextlib.contextmanager
    def watcher(*_: Any) -> Iterator[Watcher]:
        yield watchers.pop() if watchers else lambda _: None

    monkeypatch.setattr(importlib.import_module("paceline.api.train"), "watcher", watcher)
    return watchers
