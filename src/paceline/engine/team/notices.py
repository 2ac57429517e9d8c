"""What ranks tell each other outside the collectives: who has failed, who is slow on purpose, who is there."""

import json
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.core import errors
from paceline.core.errors import PacelineError, WorkerError
from paceline.core.types import Seconds

_VERDICT, _ROLL = "verdict", "roll"


class Notices:
    """Notes in the job's store, which outlives a rank: torchrun keeps it, or rank 0.

    Args:
        store: with names of this run alone.
        rank: who writes.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def judge(self, error: PacelineError) -> PacelineError:
        """Say why the run ends; the first who says it wins. Returns what all ranks raise."""
        said = json.dumps({"kind": type(error).__name__, "text": str(error)})
        return _read(self._store.compare_set(_VERDICT, "", said))

    def verdict(self) -> PacelineError | None:
        """Why the run ends, if somebody has said so."""
        return _read(self._store.get(_VERDICT)) if self._store.check([_VERDICT]) else None

    def excuse(self, until_ns: int) -> None:
        """This rank will say nothing until then, by rank 0's clock."""
        self._store.set(f"excused {self._rank}", str(until_ns))

    def excused_ns(self) -> int:
        """When the last of those who have excused themselves will be back; 0: nobody has."""
        names = [f"excused {rank}" for rank in range(self._size)]
        return max((int(self._store.get(name)) for name in names if self._store.check([name])), default=0)

    def call_roll(self) -> None:
        """Ask all who wait to say so."""
        self._store.set(_ROLL, "")

    def roll_called(self) -> bool:
        """Whether somebody asks who is there."""
        return bool(self._store.check([_ROLL]))

    def here(self) -> None:
        """Answer it."""
        self._store.set(_here(self._rank), "")

    def absent(self, seconds: Seconds) -> list[int]:
        """Who has not answered within so long."""
        names = {rank: _here(rank) for rank in range(self._size)}
        try:
            self._store.wait(list(names.values()), timedelta(seconds=seconds))
        except RuntimeError:  # of a file store no DistStoreError
            return [rank for rank, name in names.items() if not self._store.check([name])]
        return []

    def read(self, rank: int) -> None:
        """This rank has read the verdict."""
        self._store.set(f"read {rank}", "")

    def await_readers(self, seconds: Seconds) -> None:
        """Wait so long for all others to read it."""
        try:
            self._store.wait([f"read {r}" for r in range(self._size) if r != self._rank], timedelta(seconds=seconds))
        except RuntimeError:  # of a file store no DistStoreError
            return


def _here(rank: int) -> str:
    return f"here {rank}"


def _read(said: bytes) -> PacelineError:
    verdict = json.loads(said)
    kind = getattr(errors, verdict["kind"], WorkerError)
    error: PacelineError = kind(verdict["text"])
    return error
