"""Which ranks take part in a run that survives deaths: agreed through the job's store, one generation after the other.

::

    generation 0   0 1 2 3     a rank of it is lost: the others abandon the generation, and use its group no more
                   |   | |     each proposes itself, with the collectives it has completed and the deaths it knows of
    generation 1   0   2 3     the first complete set that is stored is the set, by one compare-and-set

A rank that has ended is *known* to be dead: by its pidfd on its own host, or by its own word. One that is silent is
*suspected*: it may be cut off, and go on elsewhere. So ranks that suspect others go on only if they are more than half
of those not known to be dead; else they wait for the others, and end if these are not back in time. As each collective
needs all members of a generation, and a member proposes itself for the next one only after it has abandoned the last,
no two generations are ever at work.
"""

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from paceline.core.errors import WaitTimeoutError, WorkerError
from paceline.core.types import Seconds
from paceline.engine.spmd.bounded_store import BoundedStore
from paceline.engine.spmd.rank_registry import RankRegistry

# Time between two looks at the store while ranks agree.
LOOK_S: Seconds = 0.02

# Time between two looks for ranks that ask to join.
REQUEST_S: Seconds = 1.0

# Shortest time that ranks are given to propose themselves. Those that wait look at the store four times a second, and
# where one that was cut off is back, the request of another may come a second later.
PROPOSAL_S: Seconds = 2.0


class RanksLost(Exception):  # noqa: N818 (an event: the others go on)
    """A collective can't complete, since a rank of the generation is lost or has abandoned it.

    Args:
        reason: in words.
        waited_s: how long this rank had waited for it.
    """

    def __init__(self, reason: str, waited_s: Seconds) -> None:
        super().__init__(reason)
        self.waited_s = waited_s


class NoMemberError(WorkerError):
    """This rank is no member any more, which concerns no other one."""


class ExcludedError(NoMemberError):
    """The others have gone on without this rank."""


class MinorityError(NoMemberError):
    """This rank is among too few to go on; the others may have gone on, or have ended likewise."""


@dataclass(frozen=True)
class Survives:
    """How a run goes on when ranks die.

    Args:
        suspect_after_s: time that silent ranks are given to propose themselves.
        timeout_s: time that they are given where those that have proposed themselves are no majority.
        say: tells the user something.
    """

    suspect_after_s: Seconds
    timeout_s: Seconds
    say: Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """The ranks that take part, from one agreement to the next.

    Args:
        number: counted from 0.
        members: their ranks; the first one does what one rank does for all, and those that have joined come last.
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


class RankMembership:
    """The generations of one run, as one of its ranks takes part in them.

    Args:
        store: of the run.
        registry: of the ranks of the first generation.
        rank: this one.
        survives: how the run goes on.
    """

    def __init__(self, store: BoundedStore, registry: RankRegistry, rank: int, survives: Survives) -> None:
        self.store, self._registry, self.rank, self._survives = store, registry, rank, survives
        self._admitted = set[str]()
        self._looked_s = time.monotonic()
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

    def agree(self, completed: int, waited_s: Seconds = 0.0) -> Generation:
        """Abandon this generation, and agree with the others on the next one.

        Args:
            completed: collectives that this rank has completed.
            waited_s: how long it had waited already.

        Raises:
            ExcludedError: the others have gone on without it.
            MinorityError: it is among too few to go on.
        """
        began, waits, seen = time.monotonic() - waited_s, False, 0
        suspected = max(began + self.silence_s, time.monotonic() + PROPOSAL_S)
        deadline = max(began + self._survives.timeout_s, suspected)
        number, store = self.number + 1, self.store
        store.set(f"abandoned {self.number}", "")
        self._propose(number, completed, {})
        while not store.check([f"generation {number}"]):
            proposals, dead = self._proposals(number)
            now, joined = time.monotonic(), self.requests(dead)
            silent = [r for r in self.generation.members if r not in proposals and r not in dead]
            if waits and len(proposals) > seen:  # where one is back, others may be in a moment
                suspected = now + PROPOSAL_S
            seen, too_few = len(proposals), bool(silent) and not self._majority(proposals, dead)
            if too_few and now > suspected:
                if now > deadline:
                    raise self._minority(proposals, dead, silent)
                if not waits and self.rank == min(proposals):
                    self._survives.say(
                        f"{self._names(silent)} said nothing for {self.silence_s:g} s; ranks {sorted(proposals)} are "
                        f"no majority without them, and wait for up to {deadline - now:.0f} s more"
                    )
                waits = True
            if silent and (too_few or now <= suspected):
                time.sleep(LOOK_S)
                continue
            order = self.generation.members
            reasons = dead | dict.fromkeys(silent, f"said nothing for {self.silence_s:g} s")
            done = {rank: proposals[rank] for rank in order if rank in proposals and rank not in dead}
            if len(set(done.values())) > 1:  # new ranks come in when no member has to catch up
                joined = {}
            proposed = Generation(number, (*done, *sorted(joined)), done, reasons, joined)
            store.compare_set(f"generation {number}", "", json.dumps(asdict(proposed)))
        self.generation = Generation.read(store.get(f"generation {number}"))
        for text in self.generation.joined.values():
            self._admitted.add(text)
            self.store.set(f"admitted {text}", str(number))
        if self.rank not in self.generation.members:
            why = self.generation.left.get(self.rank, "is not among them")
            raise ExcludedError(
                f"{self._registry.own} {why}, and the others go on without it; its part of the round is discarded, and "
                "it joins them again; write a larger suspect_after_s= if a step may take so long"
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

    def _majority(self, proposals: Mapping[int, int], dead: Mapping[int, str]) -> bool:
        """Return whether more than half of those that may be alive have proposed themselves."""
        alive = [rank for rank in self.generation.members if rank not in dead]
        return 2 * len([rank for rank in proposals if rank not in dead]) > len(alive)

    def _minority(self, proposals: Mapping[int, int], dead: Mapping[int, str], silent: Sequence[int]) -> MinorityError:
        alive = [rank for rank in self.generation.members if rank not in dead]
        here = [rank for rank in proposals if rank not in dead]
        return MinorityError(
            f"{self._names(silent)} said nothing for {self._survives.timeout_s:g} s, and may be cut off rather than "
            f"dead; {self._registry.own} is among {len(here)} of {len(alive)} ranks, and no more than half of them "
            "must not go on: start the job again with checkpoint=…, resume=True, or write a larger timeout_s="
        )

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self._registry.peers[rank]) for rank in ranks)

    # ------------------------------------------------------------------------------------- ranks that are started anew

    def requests(self, also: Collection[int] = ()) -> dict[int, str]:
        """Return the requests of ranks that are no members, but were started again and ask to join.

        Args:
            also: members that are dead.
        """
        absent = [r for r in range(len(self._registry.peers)) if r not in self.generation.members or r in also]
        asked = [rank for rank in absent if self.store.check([f"join {rank}"])]
        found = {rank: self.store.get(f"join {rank}").decode() for rank in asked}
        return {rank: text for rank, text in found.items() if text not in self._admitted}

    def asked(self) -> bool:
        """Return whether ranks ask to join; looks at the store now and then."""
        if len(self.generation.members) == len(self._registry.peers) or time.monotonic() < self._looked_s + REQUEST_S:
            return False
        self._looked_s = time.monotonic()
        return bool(self.requests())

    def join(self, timeout_s: Seconds) -> Generation:
        """Ask to join, and return the generation of which this rank is a member.

        Raises:
            WaitTimeoutError: nobody has taken it in.
        """
        own = json.dumps(asdict(self._registry.own) | {"token": uuid.uuid4().hex})
        self.store.set(f"join {self.rank}", own)
        deadline = time.monotonic() + timeout_s
        while not self.store.check([f"admitted {own}"]):
            if self.store.check(["over"]):
                raise WaitTimeoutError(f"rank {self.rank} asked to join the run again, but it is over")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"rank {self.rank} asked to join the run again, and the others did not take it in within "
                    f"{timeout_s:g} s; they do so between two steps under on_death='continue', once they know that it "
                    "has died"
                )
            time.sleep(LOOK_S)
        number = int(self.store.get(f"admitted {own}"))
        self.generation = Generation.read(self.store.get(f"generation {number}"))
        return self.generation

    def end(self) -> None:
        """Note that the run is over."""
        self.store.set("over", "")
