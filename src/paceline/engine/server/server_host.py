"""What hosts a server, or its standby, which may become the server, in whatever process."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.base import Job
from paceline.engine.server import messages
from paceline.engine.server.event_log import Batch, Follower
from paceline.engine.server.executor import ServerShare
from paceline.engine.server.messages import Member
from paceline.engine.server.other_servers import OtherServers, servers_of
from paceline.engine.server.peer import Notified, Peer
from paceline.engine.server.server_mesh import ServerMesh, introduce
from paceline.engine.server.server_run import ServerRun
from paceline.engine.server.server_state import ServerState
from paceline.engine.server.slice_run import SliceRun


class ServerHost:
    """A server or its standby, in one run after the other; its methods are those that others call.

    Args:
        address: of the interface that it listens at.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._job: Job | None = None
        self._run: ServerRun | SliceRun | None = None
        self._follower: Follower | None = None
        self._mesh: ServerMesh | None = None
        self._stood: SliceRun | None = None
        """What the standby of a first server was, before it took over."""
        self._installed = asyncio.Event()
        """Set once the copy is there."""

    def prepare(self, job: Job) -> None:
        """Begin a run of this job; the part that is had in it follows: a server's, or a standby's."""
        self._job, self._follower = job, None
        self._installed = asyncio.Event()

    async def open(
        self, number: int, replicas: Sequence[Notified], scorer: Peer | None, peers: Mapping[Member, Peer] | None = None
    ) -> None:
        """Begin to serve the run.

        Args:
            number: of the run.
            replicas: those that take part at first.
            scorer: the evaluator; None: the server evaluates by itself.
            peers: the other servers, each of which has a slice of A, and the standbys of all, which are prepared.
        """
        job, peers = self._prepared, peers or {}
        first = len(replicas) if job.strategy.elastic else None
        servers = servers_of(peers)
        self._mesh = mesh = ServerMesh(servers, Member(0), job.timeout_s)
        state = ServerState(job, replicas=first, share=ServerShare(servers, 0, mesh.summed))
        for member, peer in sorted(peers.items()):
            await peer.call("open_slice", servers, member, first, state.executor.packed_slice(member.number))
        await introduce(mesh, peers)
        others = OtherServers(peers, job.timeout_s, job.suspect_after_s)
        await others.connect()
        mesh.why = others.why
        self._run = ServerRun(job, number, state, replicas, scorer, others, self._address)

    async def open_slice(
        self, servers: int, member: Member, replicas: int | None, packed: messages.Bytes | None
    ) -> None:
        """Begin to have a slice of A in the run; arguments as of :class:`SliceRun`."""
        self._run = SliceRun(self._prepared, servers, member, replicas, packed, self._address)

    @property
    def _prepared(self) -> Job:
        assert self._job is not None, "no job was prepared"
        return self._job

    def alive(self) -> None:
        """Answer, which a server that is stopped does not."""

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the run."""
        assert self._run is not None, f"{method}: no run is open"
        return await getattr(self._run, method)(*args)

    async def install(self, number: int, copied: Sequence[messages.Bytes]) -> None:
        """Take a copy of the server's state."""
        self._follower = Follower(number, ServerState(self._prepared, copied))
        self._installed.set()

    async def follow(self, batch: Batch, *arrays: messages.Bytes) -> None:
        """Take events of the server."""
        await self._installed.wait()  # this may come before install
        assert self._follower is not None, "the run has ended"
        self._follower.follow(batch, arrays)

    async def take_over(
        self, number: int, replicas: Sequence[Notified], scorer: Peer, peers: Mapping[Member, Peer] | None = None
    ) -> tuple[int, int]:
        """Become the first server of a run; return the numbers of updates and of Δs; arguments as of ``open``."""
        job, stood = self._prepared, self._run
        if isinstance(stood, SliceRun):
            others = OtherServers(peers or {}, job.timeout_s, job.suspect_after_s, stood.take_over())
            await others.connect()
            self._stood, state = stood, await stood.promote()
            stood.mesh.why = others.why
        else:
            assert self._follower is not None, "no copy has come"
            others, state = OtherServers({}, job.timeout_s, job.suspect_after_s), self._follower.promote()
        self._run = run = ServerRun(job, number, state, replicas, scorer, others, self._address)
        run.take_over()
        return state.counts()

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()
        elif self._follower is not None:
            self._follower.state.executor.spans.close()
        for what in (self._stood, self._mesh):
            if what is not None:
                what.close()
        self._run = self._follower = self._job = self._stood = self._mesh = None
        self._installed.set()  # nobody waits for a copy any more
