"""Actors, as the servers and replicas of a run call each other; and what all actors have in common."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import ray
import torch

from paceline.checkpoint.fingerprint import differences, versions
from paceline.comm.linux import keep_freed_memory
from paceline.core.errors import InputError
from paceline.engine.base import Job
from paceline.engine.server import messages
from paceline.engine.server.evaluation import EvaluatorHost
from paceline.engine.server.messages import Bytes
from paceline.engine.server.peer import Peer, PeerError, PeerLostError, ReferencesLostError
from paceline.engine.server.server_host import ServerHost

# Concurrency group of the calls to a replica's actor while its loop runs.
CONTROL = "control"


class WorkerLocation(NamedTuple):
    """Process and node of an actor."""

    pid: int
    node: str


def refuse_other_versions(expected: Mapping[str, str]) -> None:
    """Raise InputError where this node has other versions than the main process; Ray compares its own and Python's."""
    if found := differences(versions(), expected, (f"node {socket.gethostname()} of the Ray cluster", "main")):
        raise InputError(f"{found}; install the same version on all nodes")


class Actor:
    """Base of the actors."""

    def place(self, expected: Mapping[str, str] | None = None) -> WorkerLocation:
        """Return the location of this actor; refuse to be one where its node has other versions than ``expected``."""
        if expected is not None:
            refuse_other_versions(expected)
        return WorkerLocation(os.getpid(), ray.get_runtime_context().get_node_id())


class ServerActor(Actor, ServerHost):
    """The actor of a server or of its standby, kept from run to run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        super().__init__(ray.util.get_node_ip_address())

    async def receive(self, parts: Sequence[Bytes]) -> None:
        """Begin a run of this job, which is packed."""
        job: Job = messages.unpack(parts)
        job.torch_settings.apply()
        self.prepare(job)


class EvaluatorActor(Actor, EvaluatorHost):
    """The actor of the evaluator."""

    def receive(self, parts: Sequence[Bytes]) -> None:
        """Begin a run of this job, which is packed."""
        job: Job = messages.unpack(parts)
        job.torch_settings.apply()
        self.prepare(job)


@final
@dataclass(frozen=True)
class RayPeer(Peer):
    """An actor."""

    actor: Any

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self.actor, method).remote(*args)
        except ray.exceptions.RayError as error:
            raise _peer_error(error) from error

    def begin(self, method: str, *args: Any) -> "PendingActorCall":
        return PendingActorCall(getattr(self.actor, method).remote(*args))

    def tell(self, method: str, *args: Any) -> None:
        getattr(self.actor, method).options(concurrency_group=CONTROL).remote(*args)

    def put(self, arrays: Sequence[Bytes]) -> list[Any]:
        return [ray.put(array) for array in arrays]


@dataclass(frozen=True)
class PendingActorCall:
    """A call of an actor's method."""

    reply: Any

    def result(self) -> Any:
        """Wait for the result; raises PeerError."""
        try:
            return ray.get(self.reply)
        except ray.exceptions.RayError as error:
            raise _peer_error(error) from error


def _peer_error(error: BaseException) -> PeerError:
    text = str(error).strip()
    if isinstance(error, ray.exceptions.RayActorError):
        return PeerLostError(text)
    lost = isinstance(getattr(error, "cause", error), ray.exceptions.ObjectLostError)
    return ReferencesLostError(text) if lost else PeerError(text)
