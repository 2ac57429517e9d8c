"""A run on the local engine, and what it may not leave."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline import Run, train
from paceline.engine.local.engine import LocalEngine
from paceline.engine.local.fault_injection import EventScript


@pytest.fixture
def local(engine: LocalEngine) -> Iterator[Callable[..., Run]]:
    """``train`` on it, by a script where one is given; afterwards no process of a run may be left."""

    def run(program: Any, strategy: Any, *, script: EventScript | None = None, **settings: Any) -> Run:
        engine.script = script or EventScript()
        return train(program, strategy, engine=engine, **{"progress": False} | settings)

    yield run
    engine.script = EventScript()
    left = [] if engine._fork_server is None else list(engine._fork_server._children.values())
    for child in left:  # of one test, which fails no other
        engine._fork_server.forget(child)
    assert not left
