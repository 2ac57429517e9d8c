"""Answers of a server to replicas: each waits until the policy releases it."""

import asyncio
from collections.abc import Awaitable, Callable

from paceline.core.types import Clock, ReplicaId
from paceline.engine.server.messages import END, Reply
from paceline.engine.server.server_state import ServerState


class Replies:
    """The next grants of all replicas, as they become known.

    Args:
        state: of the run.
        settled: waits until what is known may be told.
    """

    def __init__(self, state: ServerState, settled: Callable[[], Awaitable[None]]) -> None:
        self._state, self._settled = state, settled
        self._replied = [asyncio.Event() for _ in state.records]
        state.executor.replied = self.wake

    def wake(self, replica: ReplicaId) -> None:
        """Have a replica be answered, if its reply is there now, or it is another process."""
        self._replied[replica].set()

    async def after(self, replica: ReplicaId, incarnation: int, attempt: Clock) -> Reply:
        """Return the grant after an attempt, or the end, once it is there and may be told."""
        record, replied = self._state.records[replica], self._replied[replica]
        while incarnation >= record.incarnation:  # a server that follows may not know of the newest yet
            if incarnation == record.incarnation and (reply := record.reply_after(attempt)) is not None:
                await self._settled()
                return reply
            replied.clear()
            await replied.wait()
        return END  # another has taken its place, or the run goes on without it
