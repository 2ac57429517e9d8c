"""The main process's calls to the server of a run; if the server dies, its standby takes over, and is asked instead.

::

    main      ask ........ lost: take_over ............... ask again ........ a new standby is ready: attach
    server    |- dies
    standby   ............ promote: server from now on ... answer ........... send a copy, then events
    replica   push ....... lost: wait .......... turn_to, push again

Main alone says who is the server: a standby takes over when main has it do so, and a server goes on without one when
main has dropped it. So no two servers tell anybody anything.

Of several servers, each has its standby from the start, which has the same slice of A, and is asked in its place if it
dies; then that slice has no other one.
"""

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray

from paceline.core.errors import PacelineError, WaitTimeoutError, WorkerError
from paceline.core.records import Account
from paceline.engine.base import Job
from paceline.engine.checkpointing import LAST_SAVE_S, tell
from paceline.engine.ray.actor_pool import ActorPool, exit_reason, new_server
from paceline.engine.ray.actors import CONTROL, RayPeer
from paceline.engine.server.event_log import StandbyLostError
from paceline.engine.server.messages import FIRSTS_STANDBY, Member
from paceline.engine.server.news import NewsReader
from paceline.engine.worker_metrics import update_workers_file

# New standbys that are started after one another before main gives up.
MOST_STANDBYS = 10

# Methods whose result has what main does not know; their last argument says what it knows.
TELLING = ("stand", "save_end", "result")


class ServerClient:
    """The main process's end.

    Args:
        job: of the run.
        job_parts: reference of the packed job.
        number: of the run.
        actors: of the engine.
        reader: takes what the server tells main.
    """

    def __init__(self, job: Job, job_parts: Any, number: int, actors: ActorPool, reader: NewsReader) -> None:
        self._job, self._job_parts, self._number, self._actors = job, job_parts, number, actors
        # The server answers nobody while it writes the last checkpoint.
        self.patience_s = job.timeout_s + (LAST_SAVE_S if job.checkpoint is not None else 0.0)
        self.guarded = False
        """Whether there is a standby that has all that the server has."""
        self._coming: tuple[Any, Any] | None = None
        """A new standby's actor, and the reference of what is awaited of it."""
        self._coming_attached = False
        self._left = 0
        """How many new standbys may be started."""
        self.watches: dict[Any, Member] = {}
        """A call of each other server, and of each standby of several, that fails when that process is lost."""
        self.losses: list[str] = []
        """A sentence for each server that was lost."""
        self._reader = reader

    def open(self, replicas: list[Any]) -> None:
        """Begin the run at the servers, and at the standby."""
        actors = self._actors
        standbys = self._job.strategy.standby > 0
        alone = [actors.standby] if standbys and not actors.others else []
        members = self._members()
        for prepared in [a.receive.remote(self._job_parts) for a in (actors.server, *members.values(), *alone)]:
            self._result(prepared)
        scorer, peers = RayPeer(actors.scorer), [*map(RayPeer, replicas)]
        others = {member: RayPeer(actor) for member, actor in members.items()}
        self._result(actors.server.open.remote(self._number, peers, scorer, others))
        self.watches = {actor.ask.remote("ended"): member for member, actor in members.items()}
        actors.scorer.receive.remote(self._job_parts)
        if alone:
            self._result(self.begin("attach", RayPeer(actors.standby)))
            self._left = MOST_STANDBYS
        self.guarded = standbys

    def _members(self) -> dict[Member, Any]:
        """Return the actors of the other servers, and of the standbys of all, that live; none of an only server."""
        actors = self._actors
        if not actors.others:
            return {}
        standbys = [actors.standby, *actors.other_standbys] if self._job.strategy.standby else []
        others = {Member(number): actor for number, actor in enumerate(actors.others, 1)}
        others |= {Member(number, standby=True): actor for number, actor in enumerate(standbys) if actor is not None}
        return others

    def begin(self, method: str, *args: Any) -> Any:
        """Begin a call of a method of the server's run; return the reference of its result."""
        known = (self._reader.known,) if method in TELLING else ()
        return self._actors.server.ask.remote(method, *args, *known)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server's run, of the next server where this one is lost, and return the result."""
        return self.finish(self.begin(method, *args), method, *args)

    def finish(self, ref: Any, method: str, *args: Any) -> Any:
        """Return the result of a call that was begun; make it again where the server, or its standby, is lost."""
        while True:
            try:
                return self._result(ref)
            except _ServerLostError as error:
                self.recover(error)
            except StandbyLostError as error:
                self._drop(error)
            ref = self.begin(method, *args)

    def check(self) -> None:
        """Raise WorkerError if a server was lost, and no standby takes over."""
        self.call("clock")
        for watch, member in [*self.watches.items()]:
            try:
                ray.get(watch, timeout=0)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError as error:
                self.lose(member, exit_reason(error))

    def lose(self, member: Member, reason: str) -> None:
        """Go on without one of the other servers, or the standby of one; replicas ask the standby of a server instead.

        Raises:
            WorkerError: nobody else has its slice of A.
        """
        watched = [watch for watch, other in self.watches.items() if other == member]
        if not watched:
            return
        del self.watches[watched[0]]
        actors, number = self._actors, member.number
        if member.standby:
            self.guarded &= number > 0
            actors.drop([actors.standby if number == 0 else actors.other_standbys[number - 1]])
            self._tell_of(f"{member.label} was lost ({reason})")
            return
        standby = actors.other_standbys[number - 1] if self._job.strategy.standby else None
        if standby is None:
            raise WorkerError(f"{member.label} died, and its slice of A with it: {reason}")
        lost, actors.others[number - 1], actors.other_standbys[number - 1] = actors.others[number - 1], standby, None
        actors.drop([lost])
        self._turn_replicas(number, standby)
        self._tell_of(f"{member.label} died ({reason}); its standby goes on in its place")
        self._name(member.label, standby)

    def _turn_replicas(self, number: int, server: Any) -> None:
        """Have all replicas call a server in the place of one."""
        for handle in self._handles():
            handle.turn_to.options(concurrency_group=CONTROL).remote(self._number, number, server)

    def _handles(self) -> list[Any]:
        """Return the replicas, and where they come and go, all that ever came."""
        return self._actors.replicas[: self._job.strategy.replicas]

    def _tell_of(self, loss: str) -> None:
        """Note and tell that a server was lost."""
        self.losses.append(loss)
        tell(loss)

    def recover(self, error: BaseException) -> None:
        """Have the standby take over.

        Raises:
            WorkerError: there is none, or it is lost as well.
        """
        actors, reason = self._actors, exit_reason(error)
        if not self.guarded:
            alone = ", before a new standby had its copy" if self._job.strategy.standby else ""
            raise WorkerError(f"the server died, and A with it{alone}: {reason}") from error
        began = time.monotonic()
        actors.drop([actors.server])
        actors.server, actors.standby, self.guarded = actors.standby, None, False
        self.watches = {watch: member for watch, member in self.watches.items() if member != FIRSTS_STANDBY}
        peers = {member: RayPeer(actor) for member, actor in self._members().items()}
        part = self._number, [*map(RayPeer, self._handles())], RayPeer(actors.scorer), peers
        try:
            updates, _ = self._result(actors.server.take_over.remote(*part))
        except PacelineError as lost:
            raise WorkerError(f"the server died ({reason}), and A with it: its standby failed: {lost}") from lost
        self._turn_replicas(0, actors.server)
        seconds = time.monotonic() - began
        self._reader.another_server()
        self.losses.append(f"the server died ({reason}); its standby took over at update {updates}")
        tell(f"{self.losses[-1]}, within {seconds:.1f} s")
        self._name("coordinator", actors.server)

    def keep_standby(self) -> None:
        """Start another standby where there is none, and have it attached once it is there; called again and again."""
        actors = self._actors
        if self.guarded or (self._coming is None and not self._left):  # of several servers, each has one
            return
        if self._coming is None:
            self._left -= 1
            actor = new_server()
            self._coming, self._coming_attached = (actor, actor.place.remote()), False
            return
        actor, ref = self._coming
        if not ray.wait([ref], timeout=0)[0]:
            return
        try:
            if not self._coming_attached:
                actors.locations[actor] = ray.get(ref)
                ray.get(actor.receive.remote(self._job_parts), timeout=self.patience_s)
                self._coming, self._coming_attached = (actor, self.begin("attach", RayPeer(actor))), True
                return
            ray.get(ref)
            actors.standby, self._coming, self.guarded = actor, None, True
            self._name("standby", actor)
        except ray.exceptions.RayError as error:
            tell(f"a new standby of the server failed: {getattr(error, 'cause', error)}")
            self._abandon(actor)
            if not isinstance(error, ray.exceptions.RayActorError):
                with contextlib.suppress(PacelineError):
                    self.call("release")

    def noted(self, account: Account) -> Account:
        """Return the account of the run with a note about servers that were lost."""
        if not self.losses:
            return account
        return replace(account, notes={**account.notes, "server": "; ".join(self.losses)})

    def close(self) -> Iterable[Any]:
        """Give up a standby that is starting; return the actors that the run was open at."""
        if self._coming is not None:
            self._abandon(self._coming[0])
        actors = self._actors
        every = actors.server, *actors.others, actors.standby, *actors.other_standbys, actors.scorer
        return [actor for actor in every if actor is not None]

    def _name(self, role: str, actor: Any) -> None:
        """Write down which process has a role now."""
        update_workers_file(self._job.out, role, self._actors.locations[actor]._asdict())

    def _abandon(self, actor: Any) -> None:
        self._coming = None
        self._actors.drop([actor])

    def _drop(self, error: BaseException) -> None:
        """Drop a standby that the server has lost, and let the server go on without one."""
        self.guarded = False
        if self._actors.standby is not None:
            self._actors.drop([self._actors.standby])
        tell(f"the server's standby was lost: {error}")
        self.call("release")

    def _result(self, ref: Any) -> Any:
        """Wait for a result of the server."""
        try:
            return ray.get(ref, timeout=self.patience_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StandbyLostError):
                raise error.cause from None
            raise WorkerError(f"the server failed: {error.cause}\n\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise _ServerLostError(str(error)) from error
        except ray.exceptions.GetTimeoutError as error:
            raise WaitTimeoutError(
                f"main waited {self.patience_s:g} s for the server's answer; write a larger timeout_s="
            ) from error


class _ServerLostError(PacelineError):
    """The server's actor has died."""
