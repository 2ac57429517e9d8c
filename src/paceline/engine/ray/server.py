"""The server's actor: a session for each run, and the way from there to the other actors."""

import inspect
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
import torch

from paceline.comm.kernel import keep_freed_memory
from paceline.core.records import Record
from paceline.core.types import Clock, ReplicaId
from paceline.engine.ray.desk import LostError
from paceline.engine.ray.freight import Bytes, arrays_of, unpack
from paceline.engine.ray.messages import Place
from paceline.engine.ray.replica import place
from paceline.engine.ray.session import Session
from paceline.engine.scoring import Moment
from paceline.replica.state import State

CONTROL = "control"
"""The concurrency group of what is called on a replica that computes."""


class Handles:
    """The other actors of a run.

    Args:
        run: which run of its engine.
        replicas: their handles.
        scorer: its handle.
    """

    def __init__(self, run: int, replicas: Sequence[Any], scorer: Any) -> None:
        self._run, self._replicas, self._scorer = run, list(replicas), scorer

    def replace(self, replica: ReplicaId, handle: Any) -> None:
        """Another actor takes the place of one that has died."""
        self._replicas[replica] = handle

    def cancel(self, replica: ReplicaId, attempt: Clock) -> None:
        self._replicas[replica].cancel.options(concurrency_group=CONTROL).remote(self._run, attempt)

    def end(self, replica: ReplicaId) -> None:
        if replica < len(self._replicas):  # there are fewer where Ctrl-C came while they started
            self._replicas[replica].end.options(concurrency_group=CONTROL).remote(self._run)

    async def score(self, moment: Moment, state: State) -> Record | bytes:
        answer: Awaitable[Record | bytes] = self._scorer.score.remote(moment, *arrays_of(state))
        try:
            return await answer
        except ray.exceptions.RayError as error:
            raise LostError from error


class ServerActor:
    """Carries one session after the other."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._session: Session | None = None
        self._handles: Handles | None = None

    async def place(self) -> Place:
        """Where it lives."""
        return place()

    async def open(self, run: int, parts: Sequence[Bytes], replicas: Sequence[Any], scorer: Any) -> None:
        """A run begins."""
        self._handles = Handles(run, replicas, scorer)
        self._session = Session(unpack(parts), self._handles)

    async def replaced(self, replica: ReplicaId, handle: Any) -> None:
        """Another actor takes the place of one that has died."""
        assert self._handles is not None, "no run is open"
        self._handles.replace(replica, handle)

    async def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the session."""
        assert self._session is not None, f"{what}: no run is open"
        answer = getattr(self._session, what)(*args)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self) -> None:
        """The run has ended."""
        if self._session is not None:
            self._session.close()
        self._session = self._handles = None
