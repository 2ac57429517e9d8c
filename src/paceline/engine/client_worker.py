"""The worker of a process: a loop around one replica, its client of the parameter server, and its measurements.

One step of a worker::

    worker.step --> step.step:   client.pull -> replica.adopt -> replica.advance -> replica.finish -> client.push
                                                WorkerMetrics: busy time, step times, payload, memory, spans
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import InputError
from paceline.core.types import Clock, Nanoseconds, ReplicaId, Seconds
from paceline.engine.base import LoopEvent
from paceline.engine.batch_dispatcher import NO_BATCHES
from paceline.engine.own_loop import OwnLoop, Turns
from paceline.engine.run_context import RunContext
from paceline.engine.worker import TrainingEnded, Worker
from paceline.engine.worker_metrics import WorkerMetrics
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, Measured, Replica
from paceline.replica.flat_state import FlatState
from paceline.replica.short_steps import SHORT_STEP_NS
from paceline.replica.step_options import BUFFER
from paceline.step import Server, contribute, step

# How many layers of a forward pass check for cancellation, at least; a hook costs some microseconds.
CANCEL_CHECKS = 4


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The attempt under way was cancelled."""


class ParameterClient(Server[FlatState, Measured], Protocol):
    """A and F as one replica sees them, whatever transports the bytes."""

    attempt: Clock
    """Number of the Δ that this replica is at."""

    def batch(self) -> tuple[ReplicaId, int]:
        """Return stream and number of the batch of the next micro-step, once that is granted."""

    def wait_for_grant(self) -> bool:
        """Wait for the decision on the last Δ; return whether the replica is to go on."""

    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""

    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; return how many micro-steps after this one are left out."""

    def pause(self, seconds: Seconds) -> None:
        """Wait for an injected delay, or until cancelled."""

    def taken_back(self) -> int:
        """Return how many of the last micro-steps are to be made again, on other batches, since the last call."""

    def last_state(self) -> FlatState | None:
        """Return a copy of A after the last grant, where what was pulled may be overwritten; None: that stays."""


class GrantedClient(ABC):
    """The half of a client whose Δs are granted one by one: it counts the micro-steps of the Δ under way.

    Args:
        attempt: number of the last Δ that another worker has computed in this replica's place; 0: none.
    """

    def __init__(self, attempt: Clock = 0) -> None:
        self.breaks_off = True
        """Whether a forward pass may be broken off: not an own loop's, which would see that."""
        self.attempt = attempt
        """The Δ that this replica computes, counted from 1."""
        self._batches, self._done = NO_BATCHES, 0
        """Batches of the Δ under way, a micro-step on each, and how many of them are done."""
        self._under_way = False

    @abstractmethod
    def cancelled(self) -> bool:
        """Return whether the attempt under way was cancelled, or the run has ended."""

    @final
    def to_break_off(self) -> bool:
        """Return whether a forward pass is to end: not where it belongs to no attempt, as while a model is checked."""
        return self._under_way and self.breaks_off and self.cancelled()

    @final
    def begins_delta(self) -> bool:
        return self._done == 0

    @final
    def batch(self) -> tuple[ReplicaId, int]:
        """Return stream and number of the batch of the next micro-step, once that is granted."""
        return self._batches.stream, self._batches.first + self._done

    @final
    def ends_delta(self) -> bool:
        self._done += 1
        if self._done < self._batches.size:
            return False
        self._done = 0
        return True

    @final
    def ack_cancel(self) -> int:
        """Report that the cancelled attempt has stopped; returns how many micro-steps after this one it skips."""
        skipped = max(0, self._batches.size - self._done - 1)
        self._done = 0
        self.push(Measured(math.nan, 0, True), cancelled=True)
        return skipped

    def taken_back(self) -> int:
        """Return how many of the last micro-steps are to be made again: none, where each is granted before."""
        return 0

    @abstractmethod
    def push(self, measured: Measured, *, cancelled: bool = False) -> None:
        """Report the end of the attempt, after Δ was written unless it was cancelled."""


@final
class ForwardChecks:
    """Lets a forward pass end between two layers when its attempt is cancelled; a compiled one is in one piece.

    Checks cost as much as a small layer, so a model whose micro-steps are short has none.

    Args:
        module: that computes.
        client: knows whether it is to end.
    """

    def __init__(self, module: nn.Module, client: GrantedClient) -> None:
        self._client = client
        # Scripted layers take no hooks.
        layers = [m for m in module.modules() if next(m.children(), None) is None and not isinstance(m, ScriptModule)]
        self._layers = layers[:: max(1, len(layers) // CANCEL_CHECKS)]
        self._handles = list[RemovableHandle]()
        self.advanced(SHORT_STEP_NS)

    def advanced(self, took_ns: Nanoseconds) -> None:
        """Check from now on, or no more: a micro-step took so long."""
        short = took_ns < SHORT_STEP_NS
        if short and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        elif not (short or self._handles):
            self._handles += [layer.register_forward_pre_hook(self._check) for layer in self._layers]

    def _check(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._client.to_break_off():
            raise Cancelled


class InstrumentedReplica(Replica):
    """A replica whose pulls and pushes are recorded, and whose forward passes may be checked."""

    def __init__(
        self,
        inner: Replica,
        metrics: WorkerMetrics,
        client: ParameterClient,
        delta_bytes: int,
        checks: ForwardChecks | None = None,
    ) -> None:
        self._inner, self._metrics, self._client, self._bytes = inner, metrics, client, delta_bytes
        self._checks = checks

    def adopt(self, state: FlatState) -> None:
        began = time.monotonic_ns()
        self._inner.adopt(state)
        self._metrics.spent("pull", began, self._client.attempt, self._bytes)

    def advance(self, batch: Batch, clock: int) -> float:
        if self._checks is None:
            return self._inner.advance(batch, clock)
        began = time.monotonic_ns()
        loss = self._inner.advance(batch, clock)
        self._checks.advanced(time.monotonic_ns() - began)
        return loss

    def finish(self, out: FlatState) -> Measured:
        began = time.monotonic_ns()
        measured = self._inner.finish(out)
        self._metrics.spent("push", began, self._client.attempt, self._bytes)
        return measured


class ClientWorker(Worker):
    """The worker of a process whose replica reaches A and F through a client.

    Args:
        context: of the run.
        number: of the replica.
        replica: computes its Δ.
        client: of the parameter server.
        metrics: of this worker.
        first: micro-steps that another worker has made in this replica's place since the run began or was resumed.
        report: sends what the loop reports to the process that the user started.
        autograd: of the replica's model; None: this worker has a part of it.
        servers: that A is divided among.
        states: returns the optimizer's state for each parameter of A; None: this process does not have it.
    """

    def __init__(
        self,
        context: RunContext,
        number: ReplicaId,
        replica: Replica,
        client: ParameterClient,
        metrics: WorkerMetrics,
        first: int = 0,
        *,
        report: Callable[[LoopEvent], None],
        autograd: Autograd | None = None,
        servers: int = 1,
        states: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        super().__init__(context, number, report)
        self._replica, self._client, self._metrics = replica, client, metrics
        self._source = context.batches()
        self._shared = context.shares_stream
        self._ahead = self._left_out = 0
        """How many more batches the loop has been given than it has made steps: in all, and since its last step."""
        delay = context.job.delay
        self._delays = delay.stream(number, context.replicas, context.job.program.seed) if delay else None
        self._autograd, self._servers, self._states = autograd, servers, states
        self._clock = 0
        self._skip_micro_steps(context.positions[number].clock + first)
        self._first = self._clock

    @property
    def going(self) -> bool:
        if not self._client.begins_delta():
            return True
        began = time.monotonic_ns()
        granted = self._client.wait_for_grant()
        if self._clock == self._first:
            self._metrics.start()
        else:
            self._metrics.waited(began, self._client.attempt)
        return granted

    def _next_batch(self) -> Batch:
        stream, number = self._client.batch()
        if self._left_out and self._shared:
            raise InputError(
                "the loop made no step on a batch, but replicas that come and go, or compute portions, share their "
                "batches, so each needs one; write worker.step(batch) for every batch, or a fixed number of replicas "
                "under another policy"
            )
        # A loop that leaves batches out, or makes several steps on one, goes through its own stream all the same.
        own = stream == self.replica and not self._shared
        number += self._ahead if own else self._left_out
        self._ahead, self._left_out = self._ahead + 1, self._left_out + 1
        return self._source.at(stream, number)

    def _step(self, batch: Batch) -> float:
        return self._micro_step(step, batch)

    def _micro_step(self, make: Callable[[Replica, ParameterClient, Batch, Clock], float], batch: Batch) -> float:
        client, clock = self._client, self._clock
        self._clock += 1
        self._ahead, self._left_out = self._ahead - 1, 0
        try:
            if self._delays is not None and (seconds := next(self._delays)) > 0:
                began = time.monotonic_ns()
                client.pause(seconds)
                self._metrics.spent("delay", began, client.attempt)
            if client.cancelled():
                raise Cancelled
            loss = make(self._replica, client, batch, clock)
            self._source.prepare()  # while the policy decides
        except Cancelled:
            # Clock, seeds, delays and batches move on as if the attempt had been completed.
            undone = client.ack_cancel()
            self._skip_micro_steps(undone)
            self._metrics.stepped(pushed=False, skipped=undone)
            return math.nan
        if again := client.taken_back():
            self._clock -= again
        else:
            self._metrics.stepped(pushed=client.begins_delta())
        return loss

    def _open(self) -> OwnLoop:
        if self._autograd is None:
            raise InputError(
                f"worker.model and worker.optimizer need all of the model on one worker, but a replica of "
                f"{self._context.job.strategy} has a part of it on each; write for batch in worker.batches(): "
                "worker.step(batch), or a strategy without stages, shards and shard_parameters"
            )
        if isinstance(self._client, GrantedClient):
            self._client.breaks_off = False
        if self._given is not None:
            vector = dict(self._autograd.module.named_buffers())[BUFFER]
            self._given.register_buffer(BUFFER, vector, persistent=False)
            self._autograd.use(self._given)
        turns = Turns(self._adopt, self._complete, self._taken_samples, self._states)
        return OwnLoop(self._context, self.replica, self._autograd, turns, self._servers)

    def _adopt(self) -> None:
        """Wait for the next Δ's grant, and have the model adopt its A."""
        if not self.going:
            raise TrainingEnded
        if self._client.begins_delta():
            self._replica.adopt(self._client.pull())

    def _complete(self, batch: Batch) -> None:
        """Make a micro-step of the gradients that are there, and adopt the next A unless training ends."""
        if not self.going:
            raise TrainingEnded
        self._micro_step(contribute, batch)
        if self.going:
            self._adopt()
        elif self._autograd is not None and (state := self._client.last_state()) is not None:
            self._autograd.bind(state)  # the loop may look at the model after the end

    def run(self, loop: Callable[[Any], None] | None) -> None:
        """Run the user's loop, or one step a batch; then end the loader's own workers and store the measurements."""
        try:
            if loop is not None:
                loop(self)
            else:
                for batch in self.batches():  # which has waited for the grant that step() would ask for
                    self._taken_samples()
                    self._step(batch)
        except TrainingEnded:
            pass
        finally:
            self._source.close()
            self._metrics.close()

    def _skip_micro_steps(self, count: int) -> None:
        self._clock += count
        if self._delays is not None:
            deque(islice(self._delays, count), maxlen=0)
