"""How the ranks of a run go on when some of them die: a new group of those who are left, and the round made again.

::

    rank 0   round 7: sum ... lost | agree on generation 1 | new group | 2 is told to have left | round 7 again
    rank 1   round 7: sum ... lost | agree on generation 1 | new group | 2 is told to have left | round 7 again
    rank 2   round 7: +

All ranks make the same collectives in the same order, so each is known by its number. If a rank dies while the others
are in one, some may have completed it, and others not; not one can be further, since the next one needs all. At the
agreement these numbers are compared, and those behind receive the result from one that has it, with A and its
optimizer's state, in case the result was an update of them. So nothing has to be confirmed while no rank dies.

A rank that was started again joins in the same way: in the agreement's set, with the state of one of the others.
"""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from paceline.core.errors import WorkerError
from paceline.core.types import Seconds
from paceline.engine.spmd.bounded_store import bounded
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.membership import Generation, RankMembership, RanksLost
from paceline.engine.spmd.rank_registry import RankRegistry
from paceline.engine.spmd.watchdog import CollectiveWatchdog

T = TypeVar("T")

# Generations in a row whose group could not be formed, after which a rank ends: the links between hosts are broken.
MOST_FAILED = 4


class ReplicatedState(Protocol):
    """What the ranks of a run have in common, as the survivors change it and hand it over."""

    def changed(self, generation: Generation) -> None:
        """Go on with other ranks; called on all of them between the same two collectives."""

    def tensors(self) -> list[torch.Tensor]:
        """Return A, as it is on this rank."""

    def rest(self) -> Any:
        """Return what else an update changes, and is no part of the results of collectives; it can be pickled."""

    def stage(self, tensors: list[torch.Tensor], rest: Any) -> None:
        """Take these in the place of the update that the result of the missed collective asks for."""

    def whole(self) -> Any:
        """Return all of it, for a rank that joins; it can be pickled."""

    def lost_sums(self) -> None:
        """Use other memory for sums: a collective that was given up may still write into it."""


@dataclass
class Survival:
    """The collectives of one rank that are made again if a rank dies in them.

    Args:
        membership: of the run.
        communicator: of all ranks of the present generation.
        watchdog: waits for its collectives.
        registry: of the ranks.
        bound_s: longest time for a new group to form, and for silence where none other is given.
        state: of the run; None: until training begins a death ends the run.
    """

    membership: RankMembership
    communicator: Communicator
    watchdog: CollectiveWatchdog
    registry: RankRegistry
    bound_s: Seconds
    state: ReplicatedState | None = None
    arrival: Any = None
    """What :meth:`ReplicatedState.whole` was on another rank as this one joined; None: it was there from the start."""
    completed: int = 0
    """Collectives so far."""
    _result: Any = None
    """Of the newest one."""
    _untold: list[Generation] = field(default_factory=list[Generation])
    """Generations of which the state does not know yet."""

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part."""
        return self.membership.generation.members

    def collective(self, attempt: Callable[[], T], silence: Callable[[], Seconds | None] = lambda: None) -> T:
        """Return the result of a collective, which is made until all who are left have completed it.

        Args:
            attempt: makes it in the present group.
            silence: returns the longest wait for a rank that is not suspected; None: the timeout.
        """
        while True:
            self._tell()
            silence_s = self.watchdog.suspect_after_s = silence()
            try:
                result = attempt()
            except RanksLost as lost:
                if self.state is None:
                    raise self._ended(lost) from lost
                self.membership.silence_s = silence_s or self.bound_s
                if not self._recover(lost.waited_s):
                    continue
                result = self._result
            self.completed += 1
            self._result = result
            return result

    def asked(self) -> bool:
        """Return whether ranks ask to join, on the rank that looks for them."""
        return self.membership.rank == self.members[0] and self.membership.asked()

    def admit(self) -> None:
        """Take in the ranks that ask to join; all ranks call it between the same two collectives."""
        self.membership.silence_s = self.bound_s
        behind = self._recover(0.0)
        assert not behind, "all have completed the exchange that said so"

    def _tell(self) -> None:
        while self._untold:
            assert self.state is not None, "without it there is one generation"
            self.state.changed(self._untold.pop(0))

    def _ended(self, lost: RanksLost) -> WorkerError:
        """Return the error of a run that a death ends."""
        dead = "; ".join(f"{self.registry.peers[rank]} {how}" for rank, how in self.membership.lost_now().items())
        return WorkerError(f"{dead or 'a rank was lost'} while {self.registry.own} waited: {lost}")

    # ------------------------------------------------------------------------------------------------------ a new group

    def _recover(self, waited_s: Seconds) -> bool:
        """Go on in a new group; return whether it has brought the result of the collective under way."""
        assert self.state is not None, "a death before training ends the run"
        for _ in range(MOST_FAILED):
            generation = self.membership.agree(self.completed, waited_s)
            self._untold.append(generation)
            try:
                self._form(generation)
                behind = self._catch_up(generation)
                if not behind:
                    self._tell()
                if generation.joined:
                    self._welcome(generation)
                return behind
            except RanksLost as lost:
                waited_s = lost.waited_s
        raise WorkerError(
            f"{MOST_FAILED} groups of the ranks that are left could not be formed by {self.registry.own}; are all "
            "links between their hosts up? Start the job again with checkpoint=…, resume=True"
        )

    def _form(self, generation: Generation) -> None:
        """Replace the group by one of a generation's members.

        Raises:
            RanksLost: that does not succeed.
        """
        assert self.state is not None, "a death before training ends the run"
        began = time.monotonic()
        if self.communicator.give_up_group():
            self.state.lost_sums()
        try:
            group = bounded(
                lambda: self.communicator.group.of_generation(generation.number, generation.members, self.bound_s),
                self.bound_s + 1.0,
                "the new group",
            )
        except RuntimeError as error:  # a member died meanwhile, or can't be reached
            raise RanksLost(str(error), time.monotonic() - began) from error
        self.communicator.take_group(group)

    def _catch_up(self, generation: Generation) -> bool:
        """Send the newest result to the ranks that have missed it; return whether this is one of them."""
        furthest = max(generation.completed.values())
        if min(generation.completed.values()) == furthest:
            return False
        assert self.state is not None, "a death before training ends the run"
        donor = min(rank for rank, completed in generation.completed.items() if completed == furthest)
        own = self.membership.rank
        sent = (self._result, self.state.rest()) if own == donor else None
        result, rest = self.hand_over(sent, donor)
        tensors = self.state.tensors() if own == donor else [torch.empty_like(x) for x in self.state.tensors()]
        for tensor in tensors:
            self.communicator.broadcast(tensor, generation.members.index(donor), "the state of the others")
        if generation.completed[own] == furthest:
            return False
        self._result = result
        self.state.stage(tensors, rest)
        return True

    def _welcome(self, generation: Generation) -> None:
        """Hand the state of the run to the ranks that have joined, from the first member."""
        assert self.state is not None, "a death before training ends the run"
        donor, sent = generation.members[0], None
        if self.membership.rank == donor:
            registry = self.registry
            sent = self.completed, registry.peers, registry.clock_offset_ns, self.state.whole()
        self.hand_over(sent, donor)
        self.hand_over(time.monotonic_ns(), donor)

    def arrive(self) -> None:
        """Receive the state of the run, as a rank that joins it."""
        registry, donor = self.registry, self.members[0]
        self.completed, peers, offset_ns, self.arrival = self.hand_over(None, donor)
        elsewhere = peers[donor].kernel != registry.own.kernel
        donors_ns = self.hand_over(None, donor)  # the sooner it comes, the better the clocks agree
        registry.clock_offset_ns = offset_ns + (donors_ns - time.monotonic_ns() if elsewhere else 0)
        registry.know(peers[rank] for rank in self.members if rank != registry.own.rank)

    def hand_over(self, value: Any, source: int) -> Any:
        """Return one rank's value on all ranks of the generation."""
        root = self.members.index(source)
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self.communicator.broadcast(size, root, "the state of the others")
        if self.membership.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.communicator.broadcast(content, root, "the state of the others")
        return pickle.loads(content.numpy().tobytes())
