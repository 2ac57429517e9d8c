"""Which version of A lies where, and who reads it."""

from paceline.core.types import ReplicaId
from paceline.engine.local.store import Store


class Places:
    """The places of a store's versions. At first the present A lies in place 0, and nobody reads.

    Args:
        store: among its P + 2 places there is always one that P readers and the present A leave free.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._free = list(reversed(range(1, store.plan.versions)))
        self._reads: dict[ReplicaId, int] = {}
        self._readers = [0] * store.plan.versions
        self._new = set(self._free)
        self.present = 0
        """Where the present A lies."""

    def read(self, replica: ReplicaId) -> int:
        """A replica computes from the present A from now on; where that lies."""
        self._reads[replica] = place = self.present
        self._readers[place] += 1
        return place

    def read_no_more(self, replica: ReplicaId) -> None:
        """A replica has computed, or is gone."""
        place = self._reads.pop(replica, None)
        if place is not None:
            self._readers[place] -= 1
            self._let_go(place)

    def free(self) -> int:
        """A place that nobody reads and that is not the present A; it has memory.

        Raises:
            PacelineError: there is not that much memory.
        """
        place = self._free[-1]
        if place in self._new:
            self._store.claim(f"version {place}")
            self._new.remove(place)
        return place

    def move_to(self, place: int) -> None:
        """The place that :meth:`free` gave holds the present A now."""
        taken = self._free.pop()
        assert taken == place, "not the place that was free"
        before, self.present = self.present, place
        self._let_go(before)

    def _let_go(self, place: int) -> None:
        if not self._readers[place] and place != self.present:
            self._free.append(place)
