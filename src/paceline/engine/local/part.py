"""One worker's part of a replica that has several: of A, of Δ, and what computes it."""

from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.mesh import Mesh, Place
from paceline.core.types import Clock, Version
from paceline.engine.local.board import Board
from paceline.engine.local.label import label
from paceline.engine.local.store import Store
from paceline.engine.local.words import Said
from paceline.engine.team.parts import Divided
from paceline.engine.team.windows import Windows, answered_for
from paceline.replica.base import Batch, Replica
from paceline.replica.state import State


class Held(Protocol):
    """What a worker has of a replica."""

    mesh: Mesh
    place: Place
    """Of the worker in its replica."""
    stages: list[Divided]
    state: State
    """The worker's part of A."""


class OwnPart:
    """One worker's.

    Args:
        store: the run's vectors.
        board: its words, which say where which version lies.
        place: of this worker among all workers of the run.
        held: what it has of the replica.
        inner: computes its part of Δ.
        forget: called where nothing that ``inner`` has of its own is of use any more.
    """

    def __init__(
        self, store: Store, board: Board, place: Place, held: Held, inner: Replica, forget: Callable[[], None]
    ) -> None:
        self._store, self._board, self._place, self._inner, self._forget = store, board, place, inner, forget
        self._shard, self._stage = held.mesh.shard(held.place), held.stages[held.place.stage]
        self._names = answered_for(held.stages, held.mesh, held.place)
        self._mine, self._delta = held.state, held.state.layout.new()
        self._reads: dict[int, Windows] = {}
        self._writes: dict[int, Windows] = {}
        self._version: Version = 0

    def adopt(self, place: int, version: Version, *, anew: bool) -> None:
        """Take this part of a version of A.

        Raises:
            PacelineError: another version lies there, or it was written meanwhile.
        """
        before = self._board.stamped(place)
        self._reading(place).take()
        after = self._board.stamped(place)
        if not before == after == version:
            raise PacelineError(
                f"replica {label(self._place)} was sent version {version} of A, but read {before} and then {after} in "
                f"place {place}: all parts of a replica must read one version; this is a defect of paceline"
            )
        self._version = after
        if anew:
            self._forget()
        self._inner.adopt(self._mine)

    def advance(self, batch: Batch, clock: Clock) -> float:
        """One micro-step; its mean loss, where that is known."""
        return self._inner.advance(batch, clock)

    def finish(self, slot: int) -> Said:
        """Write this part of Δ into the replica's slot."""
        measured = self._inner.finish(self._delta)
        self._writing(slot).put()
        return Said(self._version, measured.finite, measured.samples, measured.loss)

    def _reading(self, place: int) -> Windows:
        if place not in self._reads:
            whole = self._store.reading(place)
            self._reads[place] = Windows(self._mine, whole, self._stage.lies, self._shard)
        return self._reads[place]

    def _writing(self, slot: int) -> Windows:
        if slot not in self._writes:
            whole = self._store.delta(self._place.replica, slot)
            self._writes[slot] = Windows(self._delta, whole, self._stage.lies, self._shard, self._names)
        return self._writes[slot]
