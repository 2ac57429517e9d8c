"""Which ranks take part in a run that survives deaths: agreed through the job's store, one generation after the other.

::

    generation 0   0 1 2 3     a rank of it is lost: the others abandon the generation, and use its group no more
                   |   | |     each proposes itself, with the collectives it has completed and the deaths it knows of
    generation 1   0   2 3     the first complete set that is stored is the set, by one compare-and-set

A rank that has ended is *known* to be dead: by its pidfd on its own host, or by its own word. One that is silent is
*suspected*: it may be cut off, and go on elsewhere. So ranks that suspect others go on only if they are more than half
of those not known to be dead; else they end. As each collective needs all members of a generation, and a member
proposes itself for the next one only after it has abandoned the last, no two generations are ever at work.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from paceline.core.errors import WorkerError
from paceline.core.types import Seconds
from paceline.engine.spmd.bounded_store import BoundedStore
from paceline.engine.spmd.rank_registry import PeerInfo, RankRegistry

# Time between two looks at the store while ranks agree.
LOOK_S: Seconds = 0.02

# Shortest time that ranks are given to propose themselves: those that wait look at the store four times a second.
PROPOSAL_S: Seconds = 1.0


class RanksLost(Exception):  # noqa: N818 (an event: the others go on)
    """A collective can't complete, since a rank of the generation is lost or has abandoned it.

    Args:
        reason: in words.
        waited_s: how long this rank had waited for it.
    """

    def __init__(self, reason: str, waited_s: Seconds) -> None:
        super().__init__(reason)
        self.waited_s = waited_s


class ExcludedError(WorkerError):
    """This rank is no member any more; the others go on, or ended by themselves."""


@dataclass(frozen=True)
class Survives:
    """How a run goes on when ranks die.

    Args:
        suspect_after_s: time that silent ranks are given to propose themselves.
        await_dead_s: time that a dead rank is given to be started again before the others go on without it.
    """

    suspect_after_s: Seconds
    await_dead_s: Seconds = 0.0


@dataclass(frozen=True)
class Generation:
    """The ranks that take part, from one agreement to the next.

    Args:
        number: counted from 0.
        members: their ranks.
        completed: collectives that each member had completed when it proposed itself.
        left: why each rank of the generation before it is no member.
        joined: the request of each rank that is a new member.
    """

    number: int
    members: tuple[int, ...]
    completed: Mapping[int, int] = field(default_factory=dict[int, int])
    left: Mapping[int, str] = field(default_factory=dict[int, str])
    joined: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def read(cls, content: bytes) -> "Generation":
        """Return the generation that is stored so."""
        row = json.loads(content)
        by_rank = {name: {int(k): v for k, v in row[name].items()} for name in ("completed", "left", "joined")}
        return cls(row["number"], tuple(row["members"]), **by_rank)


class Membership:
    """The generations of one run, as one of its ranks takes part in them.

    Args:
        store: of the run.
        registry: of the ranks of the first generation.
        rank: this one.
        survives: how the run goes on.
    """

    def __init__(self, store: BoundedStore, registry: RankRegistry, rank: int, survives: Survives) -> None:
        self.store, self._registry, self.rank = store, registry, rank
        self._await_dead_s = survives.await_dead_s
        self.generation = Generation(0, tuple(range(len(registry.peers))))
        self.silence_s = survives.suspect_after_s
        """Silence after which a rank is suspected: longer than steps take."""

    @property
    def number(self) -> int:
        """Number of the present generation."""
        return self.generation.number

    @property
    def abandoned(self) -> bool:
        """Whether a member has abandoned this generation."""
        return self.store.check([f"abandoned {self.number}"])

    def leave(self, reason: str) -> None:
        """Announce that this rank ends, so that the others need not wait for it."""
        self.store.set(f"gone {self.number} {self.rank}", reason)
        self.store.set(f"abandoned {self.number}", "")

    def lost_now(self) -> dict[int, str]:
        """Return the members of which this rank's own host says that they have ended, and how."""
        return self._registry.exited(self.generation.members)

    def agree(self, completed: int, waited_s: Seconds = 0.0, joining: Mapping[int, str] | None = None) -> Generation:
        """Abandon this generation, and agree with the others on the next one.

        Args:
            completed: collectives that this rank has completed.
            waited_s: how long it had waited already.
            joining: requests of ranks that are to be members of it.

        Raises:
            ExcludedError: this rank is among too few, or the others go on without it.
        """
        began, deadline = time.monotonic(), time.monotonic() + max(self.silence_s - waited_s, PROPOSAL_S)
        number, store = self.number + 1, self.store
        store.set(f"abandoned {self.number}", "")
        self._propose(number, completed, {})
        while not store.check([f"generation {number}"]):
            proposals, dead = self._proposals(number)
            late = time.monotonic() > deadline
            silent = [r for r in self.generation.members if r not in proposals and r not in dead]
            if silent and late:
                self._require_majority(proposals, dead, silent)
            joined = self._joining(dead, began) if joining is None else joining
            if (silent and not late) or joined is None:
                time.sleep(LOOK_S)
                continue
            reasons = dead | dict.fromkeys(silent, f"said nothing for {self.silence_s:g} s")
            members = tuple(sorted({r for r in proposals if r not in dead} | set(joined)))
            done = {r: proposals[r] for r in members if r not in joined}
            left = {rank: reason for rank, reason in reasons.items() if rank not in joined}
            proposed = Generation(number, members, done, left, joined)
            store.compare_set(f"generation {number}", "", json.dumps(asdict(proposed)))
        self.generation = Generation.read(store.get(f"generation {number}"))
        if self.rank not in self.generation.members:
            why = self.generation.left.get(self.rank, "is not among them")
            raise ExcludedError(
                f"{self._registry.own} {why}, and the others go on without it; its part of the round is discarded: "
                "start it again to join, or write a larger suspect_after_s= if a step may take so long"
            )
        return self.generation

    def _propose(self, number: int, completed: int, dead: Mapping[int, str]) -> None:
        self.store.set(f"proposal {number} {self.rank}", json.dumps({"completed": completed, "dead": dead}))

    def _proposals(self, number: int) -> tuple[dict[int, int], dict[int, str]]:
        """Return the collectives that each rank has completed that proposed itself, and who is known to be dead."""
        completed: dict[int, int] = {}
        dead: dict[int, str] = {}
        for rank in self.generation.members:
            if (row := self.store.found(f"proposal {number} {rank}")) is not None:
                completed[rank] = row["completed"]
                dead |= {int(r): reason for r, reason in row["dead"].items()}
            elif self.store.check([key := f"gone {self.number} {rank}"]):
                dead[rank] = self.store.get(key).decode()
        found = self.lost_now()
        if not found.keys() <= dead.keys():  # those on other hosts can't see it
            self._propose(number, completed[self.rank], dead | found)
        return completed, found | dead  # a rank that failed has said more than its exit code does

    def _require_majority(self, proposals: Mapping[int, int], dead: Mapping[int, str], silent: Sequence[int]) -> None:
        """Raise unless more than half of those that may be alive have proposed themselves."""
        alive = [rank for rank in self.generation.members if rank not in dead]
        here = [rank for rank in proposals if rank not in dead]
        if 2 * len(here) <= len(alive):
            lost = ", ".join(str(self._registry.peers[rank]) for rank in silent)
            raise ExcludedError(
                f"{lost} said nothing for {self.silence_s:g} s, and may be cut off rather than dead; "
                f"{self._registry.own} is among {len(here)} of {len(alive)} ranks, and no more than half of them must "
                "not go on: start the job again with checkpoint=…, resume=True"
            )

    def _joining(self, dead: Mapping[int, str], began: float) -> dict[int, str] | None:
        """Return the requests of dead ranks that were started again; None while they are waited for."""
        if not self._await_dead_s:
            return {}
        requests = {rank: request for rank in dead if (request := self.request(rank)) is not None}
        waiting = len(requests) < len(dead) and time.monotonic() < began + self._await_dead_s
        return None if waiting else requests

    # ------------------------------------------------------------------------------------- ranks that are started again

    def request(self, rank: int) -> str | None:
        """Return the request of a rank that was started again, and wants to join."""
        key = f"join {rank}"
        if not self.store.check([key]):
            return None
        content = self.store.get(key).decode()
        known = json.loads(content)["peer"]
        return None if PeerInfo(**known) == self._registry.peers[rank] else content
