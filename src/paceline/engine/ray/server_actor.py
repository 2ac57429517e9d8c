"""The actor of a server, or of its standby, which may become the server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.linux import keep_freed_memory
from paceline.engine.base import Job
from paceline.engine.ray import messages
from paceline.engine.ray.event_log import Batch, Follower
from paceline.engine.ray.server import ServerRun
from paceline.engine.ray.server_state import ServerState


class ServerActor(messages.Actor):
    """The actor of a server or of its standby, kept from run to run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._job: Job | None = None
        self._run: ServerRun | None = None
        self._follower: Follower | None = None
        self._installed = asyncio.Event()
        """Set once the copy is there."""

    async def open(self, number: int, parts: Sequence[messages.Bytes], replicas: Sequence[Any], scorer: Any) -> None:
        """Begin to serve a run; of replicas that come and go, ``replicas`` are those that take part at first."""
        job: Job = messages.unpack(parts)
        first = len(replicas) if job.strategy.elastic else None
        self._run = ServerRun(job, number, ServerState(job, replicas=first), replicas, scorer)

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
        self._run = ServerRun(self._job, self._follower.run, state, replicas, scorer)
        self._run.take_over()
        return state.counts()

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.close()
        elif self._follower is not None:
            self._follower.state.executor.spans.close()
        self._run = self._follower = self._job = None
        self._installed.set()  # nobody waits for a copy any more
