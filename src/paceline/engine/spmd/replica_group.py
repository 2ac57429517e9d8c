"""A replica of several workers: its leader, which is the client of the server, and the followers that it commands.

::

    leader     grant --> Adopt --> advance own part --> Finish --> write own part of Δ --> completion
                           |           |                   |
    follower 1             +-- read    +-- advance         +-- write its part of Δ --> PartDone
"""

import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, WaitTimeoutError
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Clock, Seconds, Version
from paceline.device import synchronize
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.shard_views import ShardViews, StageSharding, owned_names
from paceline.engine.worker_metrics import WorkerMetrics
from paceline.program import map_tree
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatState
from paceline.trace.recorder import AnyRecorder

# Number of an attempt -> leaves a copy of what a worker keeps after it.
Leave: TypeAlias = Callable[[Clock], None]


class PeerExited(BaseException):
    """Another worker of this replica has exited: no failure of this one, and nothing that handles failures meets it."""


class AdoptCommand(NamedTuple):
    """Read this worker's part of a version of A."""

    buffer: int
    version: Version
    step: Clock
    reset: bool
    """Whether state that the replica keeps from Δ to Δ is invalid."""


class AdvanceCommand(NamedTuple):
    """Make a micro-step; the samples follow over the replica's process group."""

    clock: Clock
    samples: int
    forms: Any
    """(input, target) as meta tensors; None where there are no samples."""


class FinishCommand(NamedTuple):
    """Write this worker's part of Δ."""

    slot: int


class EndCommand(NamedTuple):
    """End the follower."""


Command: TypeAlias = AdoptCommand | AdvanceCommand | FinishCommand | EndCommand


class PartDone(NamedTuple):
    """Facts of a worker's part of a Δ that it has written."""

    version: Version
    """The version of A that it has read."""
    finite: bool
    samples: int
    loss: float
    """NaN where this worker does not know it."""

    @staticmethod
    def merge(parts: Sequence["PartDone"]) -> Measured:
        """Combine the parts of a Δ; the worker with the last stage, the last one, knows the loss."""
        versions = {part.version for part in parts}
        if len(versions) > 1:
            raise PacelineError(
                f"the parts of one replica read versions {sorted(versions)} of A for one Δ; this is a defect of "
                "paceline"
            )
        loss, samples = parts[-1].loss, parts[0].samples
        return Measured(loss, samples, all(p.finite for p in parts) and (not samples or math.isfinite(loss)))


@dataclass(frozen=True)
class CommandPipe:
    """One end of the pipe between the leader and a follower.

    Args:
        _connection: over its socket.
        _peer: name of the process at the other end, for errors.
        _timeout_s: longest wait for an answer.
    """

    _connection: Connection
    _peer: str
    _timeout_s: Seconds

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            PeerExited: the other end is closed.
        """
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise PeerExited(self._peer) from error

    def receive(self) -> Any:
        """Wait for a message, without a bound.

        Raises:
            PeerExited: the other end is closed.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerExited(self._peer) from error

    def answer(self, description: str) -> Any:
        """Wait for an answer.

        Args:
            description: of it, for errors.

        Raises:
            PeerExited: the other end is closed.
            WaitTimeoutError: there was none in time.
        """
        if not self._connection.poll(self._timeout_s):
            raise WaitTimeoutError(
                f"waited {self._timeout_s:g} s for {description} of {self._peer}; write a larger timeout_s= if a step "
                "takes so long"
            )
        return self.receive()


def send_all(pipes: Sequence[CommandPipe], command: Command) -> None:
    """Command all followers."""
    for pipe in pipes:
        pipe.send(command)


class GroupMemory(Protocol):
    """The memory in which the workers of one replica read A and write Δ."""

    def version(self, buffer: int) -> Version:
        """Return the version of A that is in a buffer."""

    def read(self, buffer: int) -> FlatState:
        """Return A in a buffer; the same for each call."""

    def delta(self, slot: int) -> FlatState:
        """Return the Δ in a slot; the same for each call."""


class GroupClient(Protocol):
    """The leader's client of the server."""

    attempt: Clock

    def place(self) -> tuple[int, Version, int]:
        """Return the buffer and the version of the A that is granted, and the slot of its Δ."""


class ShardMemory(Protocol):
    """One worker's part of the replica's state."""

    mesh: Mesh
    place: Coordinate
    """Of the worker in its replica."""
    stages: list[StageSharding]
    state: FlatState
    """Its part of A."""


class ShardIO:
    """Reads a worker's part of A from the replica's memory, and writes its part of Δ there.

    Args:
        group: that memory.
        place: of this worker among all workers of the run.
        memory: this worker's part.
        inner: computes its part of Δ.
        reset: called where state that ``inner`` keeps from Δ to Δ is invalid.
    """

    def __init__(
        self, group: GroupMemory, place: Coordinate, memory: ShardMemory, inner: Replica, reset: Callable[[], None]
    ) -> None:
        self._group, self._place, self.inner, self._reset = group, place, inner, reset
        self._shard, self._stage = memory.mesh.shard(memory.place), memory.stages[memory.place.stage]
        self._names = owned_names(memory.stages, memory.mesh, memory.place)
        self._state, self._delta = memory.state, memory.state.empty_like()
        self._reads: dict[int, ShardViews] = {}
        self._writes: dict[int, ShardViews] = {}
        self._version: Version = 0

    def adopt(self, buffer: int, version: Version, *, reset: bool) -> None:
        """Read this part of a version of A.

        Raises:
            PacelineError: the buffer has another version, or was written meanwhile.
        """
        if buffer not in self._reads:
            full = self._group.read(buffer)
            self._reads[buffer] = ShardViews(self._state, full, self._stage.placements, self._shard)
        before = self._group.version(buffer)
        self._reads[buffer].take()
        after = self._group.version(buffer)  # as a seqlock: the same version on both sides of the copy
        if not before == after == version:
            raise PacelineError(
                f"replica {self._place.label} was sent version {version} of A, but read {before} and then {after} in "
                f"buffer {buffer}: all parts of a replica must read one version; this is a defect of paceline"
            )
        self._version = self._state.version = after
        if reset:
            self._reset()
        self.inner.adopt(self._state)

    def finish(self, slot: int) -> PartDone:
        """Write this part of Δ into the replica's slot."""
        measured = self.inner.finish(self._delta)
        if slot not in self._writes:
            full = self._group.delta(slot)
            self._writes[slot] = ShardViews(self._delta, full, self._stage.placements, self._shard, self._names)
        self._writes[slot].put()
        synchronize(self._state.device)
        return PartDone(self._version, measured.finite, measured.samples, measured.loss)


@final
@dataclass
class ReplicaLeader(Replica):
    """All workers of a replica, as the worker with the client sees them."""

    part: ShardIO
    """The leader's own."""
    pipes: Sequence[CommandPipe]
    """To the followers."""
    communicator: Communicator | None
    """Broadcasts batches; None: there are no followers."""
    client: GroupClient
    receives_loss: bool
    """Whether the last follower sends the loss of each micro-step, which the leader does not know."""
    recorder: AnyRecorder
    """Counts the waits for followers."""
    leave: Leave = lambda _: None
    """Leaves a copy of what this worker keeps after an attempt."""
    reset: bool = False
    """Whether state that is kept from Δ to Δ is invalid: the last Δ was not finite."""

    def adopt(self, state: FlatState) -> None:
        del state  # each worker maps it by the index of its buffer
        buffer, version, _ = self.client.place()
        send_all(self.pipes, AdoptCommand(buffer, version, self.client.attempt, self.reset))
        self.part.adopt(buffer, version, reset=self.reset)
        self.reset = False

    def advance(self, batch: Batch, clock: Clock) -> float:
        tensors = (batch.input, batch.target) if batch.samples else None
        if self.communicator is not None:
            # The forms first, so that each follower has buffers for the broadcasts.
            forms = map_tree(lambda tensor: torch.empty_like(tensor, device="meta"), tensors)
            send_all(self.pipes, AdvanceCommand(clock, batch.samples, forms))
            map_tree(partial(broadcast, self.communicator), tensors)
        loss = self.part.inner.advance(batch, clock)
        if self.receives_loss and batch.samples:
            loss = float(self._answer(self.pipes[-1], "the loss of a micro-step"))
        return loss

    def finish(self, out: FlatState) -> Measured:
        del out  # each worker writes its part of Δ into it
        _, _, slot = self.client.place()
        send_all(self.pipes, FinishCommand(slot))
        own = self.part.finish(slot)
        measured = PartDone.merge([own, *(self._answer(pipe, "its part of Δ") for pipe in self.pipes)])
        self.reset = not measured.finite
        if measured.finite:  # else there is no copy of what the replica keeps, for this worker's is not there
            self.leave(self.client.attempt)
        return measured

    def _answer(self, pipe: CommandPipe, description: str) -> Any:
        began = time.monotonic_ns()
        answer = pipe.answer(description)
        self.recorder.waited_ns += time.monotonic_ns() - began
        return answer


@dataclass
class Follower:
    """Executes the commands of the leader."""

    part: ShardIO
    pipe: CommandPipe
    """To the leader."""
    communicator: Communicator
    """Broadcasts batches."""
    metrics: WorkerMetrics
    sends_loss: bool
    """Whether it sends the loss of each micro-step."""
    leave: Leave = lambda _: None
    """Leaves a copy of what this worker keeps after an attempt."""
    step: Clock = 0
    """The Δ that the replica computes, counted from 1."""

    def run(self) -> None:
        """Execute commands until the leader ends this follower."""
        while True:
            waiting = time.monotonic_ns()
            command = self.pipe.receive()
            if isinstance(command, EndCommand):
                return
            if isinstance(command, AdoptCommand) and not self.step:
                self.metrics.start()
            else:
                self.metrics.waited(waiting, self.step)
            began = time.monotonic_ns()
            if isinstance(command, AdoptCommand):
                self.step = command.step
                self.part.adopt(command.buffer, command.version, reset=command.reset)
                self.metrics.spent("pull", began, self.step)
            elif isinstance(command, AdvanceCommand):
                batch = Batch(None, None, 0)
                if command.samples:
                    empty = map_tree(lambda form: torch.empty(form.shape, dtype=form.dtype), command.forms)
                    inputs, targets = map_tree(partial(broadcast, self.communicator), empty)
                    batch = Batch(inputs, targets, command.samples)
                loss = self.part.inner.advance(batch, command.clock)
                if self.sends_loss and command.samples:
                    self.pipe.send(loss)
                self.metrics.stepped(pushed=False)
            else:
                done = self.part.finish(command.slot)
                self.leave(self.step)  # first: the leader's completion says that all of it is there
                self.pipe.send(done)
                self.metrics.spent("push", began, self.step)


def broadcast(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Broadcast one tensor of a batch from the leader, and return it; a follower gives one that is contiguous."""
    contiguous = tensor.detach().contiguous()
    if contiguous.numel():  # as one vector of bytes, which every backend broadcasts
        communicator.broadcast(contiguous.view(-1).view(torch.uint8), 0, "a batch")
    return tensor
