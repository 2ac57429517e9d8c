"""A replica of several workers: its leader, which is the client of the server, and the followers that it commands.

One worker's part of a replica that has several: of A, of Δ, and what computes it.

The two sides of a replica of several workers: the leader, which talks to main, and those that follow it.
"""

import math
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, WaitTimeoutError
from paceline.core.mesh import Coordinate, Mesh
from paceline.core.types import Clock, Seconds, Version
from paceline.engine.local.arena import ParameterArena
from paceline.engine.local.client import SharedMemoryClient
from paceline.engine.local.control_block import ControlBlock
from paceline.engine.local.worker_processes import label
from paceline.engine.spmd.communicator import Communicator
from paceline.engine.spmd.shard_views import ShardViews, StageSharding, owned_names
from paceline.engine.worker import WorkerMetrics
from paceline.program import map_tree
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatState


class PeerExited(Exception):  # noqa: N818 (who has ended is for main to say)
    """Another worker of this replica has ended."""


class Adopt(NamedTuple):
    """Take your part of the A that lies there."""

    place: int
    version: Version
    step: Clock
    anew: bool
    """Whether nothing of what you have of your own is of use any more."""


class Advance(NamedTuple):
    """Make a micro-step; the samples follow over the replica's group."""

    clock: Clock
    samples: int
    forms: Any
    """(input, target), with tensors that have no values; None where there are no samples."""


class Finish(NamedTuple):
    """Write your part of Δ."""

    slot: int


class End(NamedTuple):
    """There is nothing more to do."""


Word: TypeAlias = Adopt | Advance | Finish | End


class PartDone(NamedTuple):
    """What a worker says of its part of a Δ, once that is written."""

    version: Version
    """Of the A that it has read."""
    finite: bool
    samples: int
    loss: float
    """NaN where it is not known."""


class CommandPipe:
    """Between the leader and one follower, at either end.

    Args:
        fd: of a socket of its own.
        whom: who is at the other end.
        timeout_s: how long an answer may take.
    """

    def __init__(self, fd: int, whom: str, timeout_s: Seconds) -> None:
        self._connection, self._whom, self._timeout_s = Connection(fd), whom, timeout_s

    def say(self, what: Any) -> None:
        """Tell the other end something.

        Raises:
            Parted: nobody is there.
        """
        try:
            self._connection.send_bytes(pickle.dumps(what))
        except OSError as error:
            raise PeerExited(self._whom) from error

    def hear(self) -> Any:
        """Wait, as long as it takes, for what the other end says.

        Raises:
            Parted: nobody is there.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise PeerExited(self._whom) from error

    def answer(self, what: str) -> Any:
        """Wait for an answer.

        Args:
            what: it is, in words.

        Raises:
            Parted: nobody is there.
            WaitTimeoutError: none has come in time.
        """
        if not self._connection.poll(self._timeout_s):
            raise WaitTimeoutError(
                f"waited {self._timeout_s:g} s for {what} of {self._whom}; write a larger timeout_s= if a step takes "
                "so long"
            )
        return self.hear()


def say_all(lines: Sequence[CommandPipe], word: Word) -> None:
    """Tell all followers."""
    for line in lines:
        line.say(word)


class ShardMemory(Protocol):
    """What a worker has of a replica."""

    mesh: Mesh
    place: Coordinate
    """Of the worker in its replica."""
    stages: list[StageSharding]
    state: FlatState
    """The worker's part of A."""


class ShardIO:
    """One worker's.

    Args:
        store: the run's vectors.
        board: its words, which say where which version lies.
        place: of this worker among all workers of the run.
        held: what it has of the replica.
        inner: computes its part of Δ.
        forget: called where nothing that ``inner`` has of its own is of use any more.
    """

    def __init__(
        self,
        store: ParameterArena,
        board: ControlBlock,
        place: Coordinate,
        held: ShardMemory,
        inner: Replica,
        forget: Callable[[], None],
    ) -> None:
        self._store, self._board, self._place, self._inner, self._forget = store, board, place, inner, forget
        self._shard, self._stage = held.mesh.shard(held.place), held.stages[held.place.stage]
        self._names = owned_names(held.stages, held.mesh, held.place)
        self._mine, self._delta = held.state, held.state.layout.new()
        self._reads: dict[int, ShardViews] = {}
        self._writes: dict[int, ShardViews] = {}
        self._version: Version = 0

    def adopt(self, place: int, version: Version, *, anew: bool) -> None:
        """Take this part of a version of A.

        Raises:
            PacelineError: another version lies there, or it was written meanwhile.
        """
        before = self._board.version_in(place)
        self._reading(place).take()
        after = self._board.version_in(place)
        if not before == after == version:
            raise PacelineError(
                f"replica {label(self._place)} was sent version {version} of A, but read {before} and then {after} in "
                f"place {place}: all parts of a replica must read one version; this is a defect of paceline"
            )
        self._version = after
        if anew:
            self._forget()
        self._inner.adopt(self._mine)

    def advance(self, batch: Batch, clock: Clock) -> float:
        """One micro-step; its mean loss, where that is known."""
        return self._inner.advance(batch, clock)

    def finish(self, slot: int) -> PartDone:
        """Write this part of Δ into the replica's slot."""
        measured = self._inner.finish(self._delta)
        self._writing(slot).put()
        return PartDone(self._version, measured.finite, measured.samples, measured.loss)

    def _reading(self, place: int) -> ShardViews:
        if place not in self._reads:
            whole = self._store.readonly_version(place)
            self._reads[place] = ShardViews(self._mine, whole, self._stage.lies, self._shard)
        return self._reads[place]

    def _writing(self, slot: int) -> ShardViews:
        if slot not in self._writes:
            whole = self._store.delta(self._place.replica, slot)
            self._writes[slot] = ShardViews(self._delta, whole, self._stage.lies, self._shard, self._names)
        return self._writes[slot]


@final
class ReplicaLeader(Replica):
    """All workers of a replica, as the station of its leader sees them.

    Args:
        part: the leader's own.
        lines: to the followers.
        communicator: by which batches are sent; None: there are no followers.
        station: knows which A was sent, and which slot Δ goes to.
        told: whether a follower tells the loss of each micro-step, since the leader does not know it.
    """

    def __init__(
        self,
        part: ShardIO,
        lines: Sequence[CommandPipe],
        communicator: Communicator | None,
        station: SharedMemoryClient,
        *,
        told: bool,
    ) -> None:
        self._part, self._lines, self._communicator, self._station, self._told = (
            part,
            lines,
            communicator,
            station,
            told,
        )
        self._anew = False

    def adopt(self, state: FlatState) -> None:
        del state  # each maps it by its place
        order = self._station.order
        say_all(self._lines, Adopt(order.place, order.version, self._station.attempt, self._anew))
        self._part.adopt(order.place, order.version, anew=self._anew)
        self._anew = False

    def advance(self, batch: Batch, clock: Clock) -> float:
        tensors = (batch.input, batch.target) if batch.samples else None
        if self._lines:
            say_all(self._lines, Advance(clock, batch.samples, map_tree(_form, tensors)))
            map_tree(self._send, tensors)
        loss = self._part.advance(batch, clock)
        if self._told and batch.samples:
            loss = float(self._lines[-1].answer("the loss of a micro-step"))
        return loss

    def finish(self, out: FlatState) -> Measured:
        del out  # each writes into it what it has of Δ
        slot = self._station.order.slot
        say_all(self._lines, Finish(slot))
        said = [self._part.finish(slot), *(line.answer("its part of Δ") for line in self._lines)]
        measured = _measured(said)
        self._anew = not measured.finite
        return measured

    def _send(self, tensor: Tensor) -> Tensor:
        assert self._communicator is not None, "nobody is there"
        if tensor.numel():
            self._communicator.broadcast(_bytes(tensor.contiguous()), 0, "a batch")
        return tensor


def _measured(said: Sequence[PartDone]) -> Measured:
    """Of all parts of a Δ."""
    versions = {each.version for each in said}
    if len(versions) > 1:
        raise PacelineError(
            f"the parts of one replica read versions {sorted(versions)} of A for one Δ; this is a defect of paceline"
        )
    known = said[-1].loss  # the worker with the last stage knows it
    good = all(each.finite for each in said) and (not said[0].samples or math.isfinite(known))
    return Measured(known, said[0].samples, good)


class Follower:
    """Does what the leader says.

    Args:
        part: its own.
        line: to the leader.
        communicator: by which batches come.
        gauge: measures it.
        tells: whether it tells the loss of each micro-step.
    """

    def __init__(
        self, part: ShardIO, line: CommandPipe, communicator: Communicator, gauge: WorkerMetrics, *, tells: bool
    ) -> None:
        self._part, self._line, self._communicator, self._gauge, self._tells = part, line, communicator, gauge, tells
        self.step: Clock = 0
        """Which Δ the replica is at."""

    def run(self) -> None:
        """Until the leader ends it."""
        while True:
            began = time.monotonic_ns()
            word = self._line.hear()
            if isinstance(word, End):
                return
            if isinstance(word, Adopt) and not self.step:
                self._gauge.start()
            else:
                self._gauge.waited(began, self.step)
            self._do(word)

    def _do(self, word: Adopt | Advance | Finish) -> None:
        began = time.monotonic_ns()
        if isinstance(word, Adopt):
            self.step = word.step
            self._part.adopt(word.place, word.version, anew=word.anew)
            self._gauge.spent("pull", began, self.step)
        elif isinstance(word, Advance):
            loss = self._part.advance(self._batch(word), word.clock)
            if self._tells and word.samples:
                self._line.say(loss)
            self._gauge.stepped(pushed=False)
        else:
            self._line.say(self._part.finish(word.slot))
            self._gauge.spent("push", began, self.step)

    def _batch(self, word: Advance) -> Batch:
        if not word.samples:
            return Batch(None, None, 0)
        inputs, targets = map_tree(self._receive, word.forms)
        return Batch(inputs, targets, word.samples)

    def _receive(self, form: Tensor) -> Tensor:
        made = torch.empty(form.shape, dtype=form.dtype)
        if made.numel():
            self._communicator.broadcast(_bytes(made), 0, "a batch")
        return made


def _form(tensor: Tensor) -> Tensor:
    """Its shape and its dtype, without values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _bytes(tensor: Tensor) -> Tensor:
    """All of it as one vector: the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)
