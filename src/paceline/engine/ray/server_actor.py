"""The actor of a server, or of its standby, which may become the server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.linux import keep_freed_memory
from paceline.engine.base import Job
from paceline.engine.ray import messages
from paceline.engine.ray.event_log import Batch, Follower
from paceline.engine.ray.executor import ServerShare
from paceline.engine.ray.other_servers import OtherServers
from paceline.engine.ray.server import ServerRun
from paceline.engine.ray.server_state import ServerState
from paceline.engine.ray.slice_run import SliceRun


class ServerActor(messages.Actor):
    """The actor of a server or of its standby, kept from run to run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._job: Job | None = None
        self._run: ServerRun | SliceRun | None = None
        self._follower: Follower | None = None
        self._installed = asyncio.Event()
        """Set once the copy is there."""

    async def open(
        self,
        number: int,
        parts: Sequence[messages.Bytes],
        replicas: Sequence[Any],
        scorer: Any,
        others: Sequence[Any] = (),
    ) -> None:
        """Begin to serve a run.

        Args:
            number: of the run.
            parts: the packed job.
            replicas: actors of those that take part at first.
            scorer: the evaluator's actor.
            others: actors of the other servers; each has a slice of A.
        """
        job: Job = messages.unpack(parts)
        first = len(replicas) if job.strategy.elastic else None
        servers = OtherServers(others, job.timeout_s)
        state = ServerState(job, replicas=first, share=ServerShare(1 + len(others), 0, servers.summed))
        for place, other in enumerate(others, 1):
            packed = state.executor.packed_slice(place)
            await other.open_slice.remote(parts, 1 + len(others), place, first, packed)
        await servers.connect()
        self._run = ServerRun(job, number, state, replicas, scorer, servers)

    async def open_slice(
        self,
        parts: Sequence[messages.Bytes],
        servers: int,
        number: int,
        replicas: int | None,
        packed: messages.Bytes | None,
    ) -> None:
        """Begin to have a slice of A in a run; arguments as of :class:`SliceRun`, but for the job, which is packed."""
        self._run = SliceRun(messages.unpack(parts), servers, number, replicas, packed)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the run."""
        assert self._run is not None, f"{method}: no run is open"
        return await getattr(self._run, method)(*args)

    async def prepare(self, parts: Sequence[messages.Bytes]) -> None:
        """Begin to be the standby in a run of this job; a copy of the server's state follows."""
        self._job, self._follower = messages.unpack(parts), None
        self._installed = asyncio.Event()

    async def install(self, number: int, copied: Sequence[messages.Bytes]) -> None:
        """Take a copy of the server's state."""
        assert self._job is not None, "no job was prepared"
        self._follower = Follower(number, ServerState(self._job, copied))
        self._installed.set()

    async def follow(self, batch: Batch, *arrays: messages.Bytes) -> None:
        """Take events of the server."""
        await self._installed.wait()  # Ray may run this before install
        assert self._follower is not None, "the run has ended"
        self._follower.follow(batch, arrays)

    async def take_over(self, replicas: Sequence[Any], scorer: Any) -> tuple[int, int]:
        """Become the server; return the numbers of updates and of Δs."""
        assert self._job is not None, "no job was prepared"
        assert self._follower is not None, "no copy has come"
        state = self._follower.promote()
        alone = OtherServers((), self._job.timeout_s)
        self._run = run = ServerRun(self._job, self._follower.run, state, replicas, scorer, alone)
        run.take_over()
        return state.counts()

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()
        elif self._follower is not None:
            self._follower.state.executor.spans.close()
        self._run = self._follower = self._job = None
        self._installed.set()  # nobody waits for a copy any more
