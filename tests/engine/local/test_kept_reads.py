"""A Δ that the policy holds keeps the A that it was computed of, also when its replica's worker has exited."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.local.arena import ArenaLayout, ParameterArena, VersionPool
from paceline.engine.local.server import SharedMemoryServer
from paceline.replica.flat_state import FlatLayout
from tests.engine import programs


@pytest.mark.parametrize(("keeps", "held", "kept"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_replica_that_has_gone_reads_what_its_delta_needs(keeps: bool, held: bool, kept: bool) -> None:
    arena = ParameterArena(ArenaLayout(FlatLayout.of(programs.mlp()), 2, 1, 1, workers=2))
    server: Any = object.__new__(SharedMemoryServer)
    server._context = SimpleNamespace(run=SimpleNamespace(keeps_read=keeps))
    server.versions, server._undecided = VersionPool(arena), {(1, 3): (0, None)} if held else {}
    read = server.versions.acquire(1)
    server.reads_no_more(1)
    if kept:
        assert server.versions.read_by(1) == read
    else:
        with pytest.raises(KeyError):
            server.versions.read_by(1)
    arena.close()
