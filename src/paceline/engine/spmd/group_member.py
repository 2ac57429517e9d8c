"""One worker of a replica that has several, from its rendezvous with the others to its end.

The workers of each replica have a process group of their own. Where one of them has exited, the others end by
:class:`~paceline.engine.spmd.replica_group.PeerExited`, since whoever has started them sees which it was.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from paceline.core import errors
from paceline.core.mesh import Coordinate
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext
from paceline.engine.spmd.launch_env import LaunchEnv
from paceline.engine.spmd.pipeline_rank import PipelineRank
from paceline.engine.spmd.process_group import Rendezvous
from paceline.engine.spmd.rank_context import RankContext, RankSetup, build_once_per_host, open_rank_context
from paceline.engine.spmd.replica_group import (
    CommandPipe,
    Follower,
    GroupClient,
    GroupMemory,
    Leave,
    PeerExited,
    ReplicaLeader,
    ShardIO,
)
from paceline.engine.spmd.shard_views import owned_names, part_of
from paceline.engine.spmd.tensor_parallel_rank import TensorParallelRank
from paceline.engine.worker_metrics import WorkerMetrics
from paceline.replica.base import Replica, micro_steps
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.local_sgd import KeepsState
from paceline.replica.module_utils import materialize
from paceline.trace.recorder import AnyRecorder

Memory = TypeVar("Memory", bound=GroupMemory)


class GroupMember(Generic[Memory]):
    """One worker with its part of the replica; all workers of the replica build theirs together.

    Args:
        setup: the worker among those of the replica.
        place: of the worker in the run.
        memory: in which the replica reads A and writes Δ.
        recorder: of this worker's spans.
    """

    def __init__(self, setup: RankSetup, place: Coordinate, memory: Memory, recorder: AnyRecorder) -> None:
        self.run, self.context, self.memory = setup.run_context, setup.context, memory
        run, strategy = self.run, setup.run_context.job.strategy
        self._staged = len(strategy.mesh.stage_workers) > 1
        ranks = PipelineRank(setup) if strategy.pipelined else TensorParallelRank(setup)
        self.layout, self.parameter_bytes = setup.layout, ranks.layout.parameter_bytes
        """Layout of A; size of this worker's part of it."""
        self.kept = ranks.state_json
        """What other workers need to take the place of this one."""
        inner: Replica = ranks.worker(1 if run.local_sgd else micro_steps(run.delta), recorder)
        reset: Callable[[], None] = lambda: None  # noqa: E731 (a gradient keeps no state from Δ to Δ)
        self.own: KeepsState | None = None
        """Its part of what the replica keeps from Δ to Δ."""
        if run.local_sgd:
            gather = setup.context.gather
            inner = stepping = ranks.stepping(inner, lambda square: sum(gather(square, "the norm of a gradient")))
            reset, self.own = stepping.forget, stepping
        self._part = ShardIO(memory, place, ranks, inner, reset)
        self._ranks, self._recorder = ranks, recorder

    def part_of(self, number: int, whole: FlatState, delta: FlatState) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of what a worker of the replica reads of A, and of what it writes of Δ.

        Args:
            number: of the worker.
            whole: A.
            delta: Δ.
        """
        mesh, stages = self._ranks.mesh, self._ranks.stages
        place = mesh.coordinate(number)
        stage, shard, owned = stages[place.stage], mesh.shard(place), owned_names(stages, mesh, place)
        read = stage.parts[shard].names
        written = [name for name in read if name in owned]
        placed = stage.placements, shard
        return part_of(whole, read, *placed), part_of(delta, written, *placed)

    def leader(self, pipes: Sequence[CommandPipe], client: GroupClient, leave: Leave) -> ReplicaLeader:
        """Return the replica as the worker with the client has it."""
        return ReplicaLeader(self._part, pipes, self.context.communicator, client, self._staged, self._recorder, leave)

    def follower(self, pipe: CommandPipe, metrics: WorkerMetrics, leave: Leave) -> Follower:
        """Return what executes the leader's commands."""
        communicator, world = self.context.communicator, self.context.world
        assert communicator is not None, "a follower has a leader"
        sends_loss = self._staged and world.rank == world.size - 1
        return Follower(self._part, pipe, communicator, metrics, sends_loss, leave)

    @property
    def sent_bytes(self) -> int:
        """Return how many bytes this worker has sent to others of its replica."""
        return 0 if self.context.communicator is None else self.context.communicator.traffic.sent_bytes


@contextlib.contextmanager
def open_member(
    job: Job,
    place: Coordinate,
    rendezvous: Rendezvous,
    kept: Mapping[str, Any],
    memory: Callable[[RunContext, FlatLayout], Memory],
    recorder: AnyRecorder,
) -> Iterator[GroupMember[Memory]]:
    """Context manager: a worker of a replica, whose workers enter it together.

    Args:
        job: what is run.
        place: of the worker in the run.
        rendezvous: of these workers, in the order of their ranks.
        kept: what the replica's dead workers had chosen, whose place these take.
        memory: run, layout of A -> memory in which the replica reads A and writes Δ.
        recorder: of this worker's spans.

    Raises:
        PeerExited: another worker of the replica has exited.
        PacelineError: it names the worker.
    """
    size, backend = rendezvous.size, rendezvous.backend
    if size > 1:
        rendezvous.join(job.timeout_s)
    # On one host, there are those of other replicas besides.
    local = job.strategy.workers if rendezvous.one_host else rendezvous.local_size
    world = LaunchEnv(rendezvous.rank, size, local, rendezvous.one_host)
    try:
        group = open_rank_context(world, backend, "cpu", job.timeout_s, watched=True)
        with group as context, _named(place, context):
            with build_once_per_host(functools.partial(materialize, job.program), context) as module:
                layout, run = FlatLayout.of(module, job.running_buffers), RunContext(job)
                setup = RankSetup(run, context, backend, module, layout, place.replica, kept)
                member = GroupMember(setup, place, memory(run, layout), recorder)
            yield member
    finally:
        if size > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def _named(place: Coordinate, context: RankContext) -> Iterator[None]:
    """Context manager: errors name this worker; those that follow from the exit of another one say so."""
    try:
        yield
    except Exception as error:
        if context.registry.first_exited() is not None:
            raise PeerExited(str(error)) from error
        first = context.store_signals is None or context.store_signals.first_failure() is None
        if isinstance(error, errors.WorkerError) and first:
            raise errors.WorkerError(f"replica {place.label}: {error}") from error
        if isinstance(error, errors.PacelineError):
            raise
        raise errors.WorkerError(errors.failure_text(json.loads(errors.encode_failure(place.label, error)))) from error


def error_message(place: Coordinate, error: BaseException) -> bytes:
    """Return the message to main of an error, which names the replica at least."""
    if not isinstance(error, errors.PacelineError):
        return errors.encode_failure(place.label, error)
    text = str(error)
    if isinstance(error, (errors.WaitTimeoutError, errors.WorkerError)) and not text.startswith("replica "):
        text = f"replica {place.replica}: {text}"
    if len(text) > errors.LONGEST_TRACEBACK:
        text = f"{text[:1000]}\n...\n{text[-errors.LONGEST_TRACEBACK :]}"
    return json.dumps({"kind": type(error).__name__, "said": text, "replica": place.replica}).encode()
