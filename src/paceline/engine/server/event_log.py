"""The events of a server, forwarded in order to its standby: a chain of two, of which the second may take over.

::

    replica   push ...................................................... answered
    server    decide, apply | add, flush ............... settled, answer
    standby                 | follow: keep the batch, acknowledge | decide, apply

Nobody is told what follows from an event before the standby has it. So whatever was told outlives the server; what was
not is asked again, of the standby. A standby that has taken over accepts no event any more, so that a server that was
only stopped can tell nobody anything.

Calls need not come in the order in which they were made (Ray's don't, of an asynchronous actor), so batches are
numbered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import PacelineError
from paceline.core.types import Seconds
from paceline.engine.replica_pace import SILENT_STEPS
from paceline.engine.server.messages import Bytes
from paceline.engine.server.peer import Peer, PeerError, ReferencesLostError
from paceline.engine.server.run_control import BackgroundTasks
from paceline.engine.server.server_state import ServerState


class Batch(NamedTuple):
    """Events that no message to anybody comes between."""

    run: int
    number: int
    events: tuple[tuple[str, tuple[Any, ...]], ...]
    """Names of methods of the state, and their arguments; those of ``arrived`` lack the arrays of Δ."""
    counts: tuple[int, int]
    """Updates and Δs after them."""


class StandbyLostError(PacelineError):
    """The standby of a server is none any more; main is to drop it, and to ask again."""


class EventLog:
    """The server's end.

    Args:
        run: number of the run.
        state: that the events have made.
        broken: called when the standby is lost.
        suspect_after_s: time after which a standby that acknowledges nothing is lost, at least.
    """

    def __init__(self, run: int, state: ServerState, broken: Callable[[], None], suspect_after_s: Seconds) -> None:
        self._run, self._state, self._broken, self._suspect_after_s = run, state, broken, suspect_after_s
        self._longest_s: Seconds = 0.0
        """Longest time that an acknowledgement has taken."""
        self._standby: Peer | None = None
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._delta: tuple[Sequence[Any], Sequence[Bytes]] = (), ()
        self._sent = 0
        self._acknowledged = 0
        """All batches up to this one are at the standby."""
        self._early: set[int] = set()
        self._tasks = BackgroundTasks()
        self._moved = asyncio.Condition()
        self.guarded = False
        """Whether the standby has a copy, and nothing is told before it has the events as well."""
        self.lost = ""
        """Why the standby is none any more; whoever waits is told nothing until :meth:`release`."""

    @property
    def attached(self) -> bool:
        """Return whether there is a standby that events are sent to."""
        return self._standby is not None

    def add(self, event: str, *args: Any, refs: Sequence[Any] = (), arrays: Sequence[Bytes] = ()) -> None:
        """Note an event that the state has taken.

        Args:
            event: name of the method.
            args: all of its arguments but the arrays.
            refs: references of these arrays, as far as they are in the object store.
            arrays: of a Δ.
        """
        if self._standby is not None:
            self._events.append((event, args))
            if arrays:
                self._delta = refs, arrays

    def flush(self) -> None:
        """Forward what was added."""
        if not self._events or self._standby is None:
            return
        self._sent += 1
        batch = Batch(self._run, self._sent, tuple(self._events), self._state.counts())
        (refs, arrays), self._delta = self._delta, ((), ())
        self._events.clear()
        self._tasks.start(self._forward(batch, refs, arrays))

    async def settled(self, *, for_main: bool = False) -> None:
        """Wait until the standby has all events up to now, if there is one; if it is lost, until main has dropped it.

        Args:
            for_main: whether it is main that waits for an answer.

        Raises:
            StandbyLostError: it is lost, of which main has to be told.
        """
        self.flush()
        sent = self._sent

        def told() -> bool:
            return not self.guarded or self._acknowledged >= sent or (for_main and bool(self.lost))

        if not told():
            async with self._moved:
                await self._moved.wait_for(told)
        if for_main and self.guarded and self.lost:
            raise StandbyLostError(self.lost)

    async def attach(self, standby: Peer) -> None:
        """Send a standby a copy of the state, and all events from now on; return once it has caught up.

        Raises:
            PacelineError: it was lost meanwhile.
        """
        self._standby, self.lost = standby, ""
        self._sent = self._acknowledged = 0
        self._early.clear()
        self._tasks.start(self._install(standby.call("install", self._run, self._state.copy())))
        self._sent = 1
        async with self._moved:
            await self._moved.wait_for(lambda: bool(self.lost) or self._acknowledged == self._sent)
            self.guarded = not self.lost
        if self.lost:
            raise PacelineError(f"the server's new standby was lost: {self.lost}")

    async def release(self) -> None:
        """Go on without a standby, which main has dropped: it can take over no more."""
        self._standby, self.guarded = None, False
        self._events.clear()
        async with self._moved:
            self._moved.notify_all()

    async def _install(self, installed: Any) -> None:
        try:
            await installed
        except PeerError as error:
            await self._lose(str(error).strip().splitlines()[0])
        else:
            await self._acknowledge(1)

    async def _forward(self, batch: Batch, refs: Sequence[Any], arrays: Sequence[Bytes]) -> None:
        standby, began, bound = self._standby, time.monotonic(), None
        assert standby is not None, "a batch is of an attached standby"
        if self.guarded:  # before that it waits for its copy
            bound = max(self._suspect_after_s, SILENT_STEPS * self._longest_s)
        try:
            try:
                await asyncio.wait_for(standby.call("follow", batch, *(refs or arrays)), bound)
            except ReferencesLostError:  # they are those of a replica that has died; its arrays are here
                await standby.call("follow", batch, *arrays)
        except TimeoutError:
            if standby is self._standby:
                waited_s = time.monotonic() - began if bound is None else bound
                await self._lose(f"it has acknowledged nothing for {waited_s:.1f} s")
        except PeerError as error:
            if standby is self._standby:
                await self._lose(str(error).strip().splitlines()[0])
        else:
            if bound is not None:
                self._longest_s = max(self._longest_s, time.monotonic() - began)
            if standby is self._standby:
                await self._acknowledge(batch.number)

    async def _acknowledge(self, number: int) -> None:
        self._early.add(number)
        while self._acknowledged + 1 in self._early:
            self._acknowledged += 1
            self._early.remove(self._acknowledged)
        async with self._moved:
            self._moved.notify_all()

    async def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        async with self._moved:
            self._moved.notify_all()
        self._broken()


class Follower:
    """The standby's end: applies the server's events to a copy of its state.

    Args:
        run: number of the run.
        state: the copy.
    """

    def __init__(self, run: int, state: ServerState) -> None:
        self.run, self.state = run, state
        self._applied = 1
        """Number of the newest batch that the state has taken; the copy itself is the first."""
        self._batches: dict[int, tuple[Batch, Sequence[Bytes]]] = {}
        self._failure: Exception | None = None
        self._promoted = False

    def follow(self, batch: Batch, arrays: Sequence[Bytes]) -> None:
        """Keep a batch, which is taken after all those before it, a moment later.

        Raises:
            PacelineError: this standby has taken over, or could not keep up with the server.
        """
        if self._promoted:
            raise PacelineError("the standby has taken over from this server")
        if self._failure is not None:
            raise self._failure
        self._batches[batch.number] = batch, arrays
        asyncio.get_running_loop().call_soon(self._catch_up)

    def promote(self) -> ServerState:
        """Return the state after all batches that have come without a gap: those after one were told to nobody.

        Raises:
            PacelineError: it is not the server's.
        """
        self._catch_up()
        self._promoted = True
        if self._failure is not None:
            raise self._failure
        return self.state

    def _catch_up(self) -> None:
        while self._failure is None and (following := self._batches.pop(self._applied + 1, None)) is not None:
            batch, arrays = following
            try:
                for event, args in batch.events:
                    getattr(self.state, event)(*args, *((arrays,) if event == "arrived" else ()))
                if self.state.counts() != batch.counts:
                    raise PacelineError(
                        f"the standby has counted {self.state.counts()} updates and Δs where the server has "
                        f"{batch.counts}: a policy must decide by its arguments alone"
                    )
            except Exception as error:
                self._failure = error
            self._applied += 1
