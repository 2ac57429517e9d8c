"""A worker of the local engine that computes nothing: its Δ lies ready, so that the engine alone is measured."""

from collections.abc import Sequence
from typing import Any

from paceline.engine.local import worker_main
from paceline.engine.run_context import RunContext
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatState


class Trivial(Replica):
    """Writes its Δ once into each slot, and after that says only that it is there."""

    def __init__(self) -> None:
        self._written: set[int] = set()

    def adopt(self, state: FlatState) -> None:
        """Nothing is read."""

    def advance(self, batch: Batch, clock: int) -> float:
        return 0.5

    def finish(self, out: FlatState) -> Measured:
        if id(out) not in self._written:
            self._written.add(id(out))
            for vector in out.vectors:
                vector.fill_(1e-6)
        return Measured(0.5, 1, finite=True)


class NoData:
    """The batches of a run that are never looked into."""

    def at(self, stream: int, number: int) -> Batch:
        """Any batch."""
        return BATCH

    def prepare(self) -> None:
        """It is there."""

    def close(self) -> None:
        """Nothing is open."""


BATCH = Batch(None, None, 1)


def main(args: dict[str, Any], fds: Sequence[int]) -> None:
    """The process's entry: the engine's own worker, with a trivial replica and no data."""

    def replica(*_: object, **__: object) -> Replica:
        return Trivial()

    RunContext.replica, RunContext.batches = replica, lambda _: NoData()  # type: ignore[assignment,method-assign]
    worker_main.main(args, fds)
