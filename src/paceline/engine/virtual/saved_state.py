"""What of a virtual run is under way, for a checkpoint: attempts, timelines, replicas with parameters of their own.

::

    read/<version>/<name>           an A that attempts have read, and that is no more
    delta/<replica>/<clock>/<name>  a Δ that is computed, and has not arrived or is held by the policy
    delta/kept/<name>               the Δ that waits for another one, for the gradient noise scale
    delta/last/<name>               the last update, of which policies ask how far a Δ agrees with it
    replica/<number>/<name>         what a replica keeps: its parameters, its optimizer's state

With these a run goes on bit for bit under any policy: all else follows from counts. What is drawn (durations, delays,
dropout, the order of the data) is drawn again from its seed, from the place that the counts say.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.aggregation.state_codec import kind
from paceline.checkpoint.base import TensorChunk
from paceline.clock.hosts import NetworkState
from paceline.core.data_order import BatchRange
from paceline.core.typed_json import of_json
from paceline.core.types import Clock, ReplicaId, Seconds, Version
from paceline.engine.batch_dispatcher import NO_BATCHES
from paceline.engine.run_context import RunContext
from paceline.engine.run_state import ResumePoint, delta_chunks
from paceline.engine.virtual.pending_delta import PendingDelta, Phase, TimelineState
from paceline.replica.base import Measured, MicroStepNorms
from paceline.replica.flat_state import FlatState
from paceline.replica.optimizer_state import whole_chunks

# Key of this state among what a checkpoint has of the engine.
KEY = "virtual"


class AttemptState(NamedTuple):
    """An attempt that has begun and was neither applied nor discarded."""

    replica: ReplicaId
    clock: Clock
    version: Version
    first_micro_step: Clock
    batches: BatchRange
    phase: Phase
    due_s: Seconds
    work_s: tuple[Seconds, Seconds]
    arrived: bool
    computed: bool
    loss: float | None
    """None where it is NaN, or not computed."""
    samples: int
    finite: bool
    micro: MicroStepNorms | None


class AttemptsState(NamedTuple):
    """All attempts that have begun and were neither applied nor discarded."""

    attempts: tuple[AttemptState, ...]
    """In the order in which they began."""
    queue: tuple[ReplicaId, ...]
    """Replicas whose attempt has not arrived, in the order of the next events."""
    timelines: tuple[TimelineState, ...]
    ahead: tuple[tuple[ReplicaId, Version], ...] = ()
    """Version of the A that the next attempt of each replica reads which pulls ahead."""
    has: tuple[tuple[ReplicaId, Version], ...] = ()
    """Version of the A that each replica was sent last over the network."""


@dataclass(frozen=True)
class VirtualState:
    """What a virtual run has under way that is no tensor."""

    now_s: Seconds
    attempts: AttemptsState
    observer: Mapping[str, Any]
    """Of the statistics that policies ask for."""
    noise: Mapping[str, Any] | None
    """Of the gradient noise scale."""
    network: NetworkState | None
    """Of links and hosts."""

    @classmethod
    def of(cls, context: RunContext) -> "VirtualState | None":
        """Return the state with which a run goes on; None: it begins, or it goes on with replicas that begin anew.

        That is so after a run of another engine or policy, with other data, another number of replicas or of hosts, and
        of users' loops, which are called anew.
        """
        resume = context.job.resume
        if resume is None or not resume.options or KEY not in resume.run.engine or context.job.loop is not None:
            return None
        run = resume.run
        same = run.replicas == context.replicas and run.coordinator.policy_kind == kind(context.policy)
        if not (same and context.same_order) or tuple(context.positions) != run.coordinator.positions:
            return None
        state: VirtualState = of_json(cls, run.engine[KEY], "the checkpoint's state of virtual time")
        hosts = len(state.network.outgoing_s) if state.network is not None else 0
        network = context.job.times.network if context.job.times is not None else None
        return state if hosts == (network.hosts if network is not None else 0) else None


def attempt_state(attempt: PendingDelta, *, arrived: bool) -> AttemptState:
    """Return the state of an attempt."""
    measured = (attempt.measured or Measured(math.nan, 0, True)).known()
    return AttemptState(
        attempt.replica,
        attempt.clock,
        attempt.version,
        attempt.first_micro_step,
        attempt.batches,
        attempt.phase,
        attempt.due_s,
        attempt.work_s,
        arrived,
        attempt.measured is not None,
        measured.loss if math.isfinite(measured.loss) else None,
        measured.samples,
        measured.finite,
        measured.micro,
    )


def attempt_chunks(
    attempts: Iterable[PendingDelta], ahead: Iterable[FlatState], current: Version
) -> Iterator[TensorChunk]:
    """Yield the Δs of attempts that are computed, and the A that others have read, or will read, each once."""
    seen = {current}
    for attempt in attempts:
        if attempt.measured is not None:
            assert attempt.out is not None, "its Δ is computed"
            yield from delta_chunks(attempt.out, attempt.replica, attempt.clock)
        if attempt.read is not None and attempt.version not in seen:
            seen.add(attempt.version)
            yield from whole_chunks(attempt.pull(), _read_prefix(attempt.version))
    for state in ahead:
        if state.version not in seen:
            seen.add(state.version)
            yield from whole_chunks(state, _read_prefix(state.version))


class ReadStates:
    """Each A that attempts had read where a run stopped, or will read, shared by them.

    Args:
        resume: where the run goes on.
        like: a state of the layout and on the device of A.
        current: returns the A of the checkpoint, shared by all attempts that have read it.
        keep: whether attempts keep it once they are computed.
    """

    def __init__(
        self, resume: ResumePoint, like: FlatState, current: Callable[[], FlatState], *, keep: bool = False
    ) -> None:
        self.keep = keep
        self._checkpoint, self._like = resume.checkpoint, like
        self._current, self._version = current, resume.run.coordinator.version
        self._read: dict[Version, FlatState] = {}

    def of(self, version: Version) -> FlatState:
        """Return the A of a version."""
        if version not in self._read:
            state = self._current() if version == self._version else self._like.empty_like()
            state.version = version
            if version != self._version:
                self._checkpoint.read_into(whole_chunks(state, _read_prefix(version)))
            self._read[version] = state
        return self._read[version]


def restored_attempts(
    states: Sequence[AttemptState], resume: ResumePoint, like: FlatState, read: ReadStates
) -> Iterator[tuple[PendingDelta, bool]]:
    """Yield attempts as they were, and whether each has arrived.

    Args:
        states: of them.
        resume: where the run goes on.
        like: a state of the layout and on the device of A.
        read: what they had read.
    """
    checkpoint = resume.checkpoint
    for state in states:
        attempt = PendingDelta(state.replica, state.clock, state.version, None, state.first_micro_step, state.batches)
        attempt.phase, attempt.due_s, attempt.work_s = state.phase, state.due_s, state.work_s
        if state.computed:
            attempt.out = like.empty_like()
            checkpoint.read_into(delta_chunks(attempt.out, state.replica, state.clock))
            loss = math.nan if state.loss is None else state.loss
            attempt.measured = Measured(loss, state.samples, state.finite, state.micro)
            attempt.done = state.batches.size
        attempt.keeps_read = read.keep
        if read.keep or not state.computed:
            attempt.read = read.of(state.version)
        yield attempt, state.arrived


def held_attempts(resume: ResumePoint, like: FlatState) -> Iterator[PendingDelta]:
    """Yield the Δs that a policy held in a run of another engine; arguments as of :func:`restored_attempts`."""
    checkpoint, names = resume.checkpoint, set(resume.held)
    for arrival in resume.run.coordinator.held:
        if (arrival.replica, arrival.clock) in names:
            attempt = PendingDelta(arrival.replica, arrival.clock, arrival.version, None, 0, NO_BATCHES)
            attempt.out = like.empty_like()
            checkpoint.read_into(delta_chunks(attempt.out, arrival.replica, arrival.clock))
            loss = math.nan if arrival.loss is None else arrival.loss
            attempt.measured = Measured(loss, arrival.samples, arrival.finite)
            yield attempt


def _read_prefix(version: Version) -> str:
    return f"read/{version}/"
