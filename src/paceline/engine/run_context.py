"""A job resolved for one process: A_0, data order, Δ, each replica's share of the budget, its replicas."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from paceline.aggregation.base import Aggregation
from paceline.core.data_order import DataOrder, DataPosition
from paceline.core.delta import Accumulated, Change, Delta, Distance, Gradient, InPlace
from paceline.core.errors import InputError
from paceline.core.records import ReplicaPosition
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.budget import Epochs, StepQuota, Steps, Unbounded
from paceline.engine.run_state import RunState
from paceline.program import Data, Program, is_source, length
from paceline.replica.base import Batch, Replica, micro_steps
from paceline.replica.batches import Stream, stream
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.local_sgd import LocalSGD, WritesInPlace
from paceline.replica.single import NO_RECORDER, Autograd, Single, step_seed
from paceline.strategy import Strategy
from paceline.trace.recorder import AnyRecorder


class RunContext:
    """A job and what follows from it; every process of a run derives the same.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        strategy = job.strategy
        self.job, self.replicas = job, strategy.replicas
        self.policy: Aggregation[Any] = strategy.aggregation
        self.order = order_of(job)
        """None where the data come from the user's function."""
        self.reference_batch = None if self.order is None else job.program.per_replica_batch(1)
        """m₀, the samples of an update by one replica alone; None where the data have no order."""
        self.delta: Delta = self.policy.delta
        """Kind of Δ that one push hands over: the policy's, accumulated if the strategy says so."""
        if isinstance(self.delta, Gradient) and strategy.accumulate > 1:
            self.delta = Accumulated(strategy.accumulate)
        self.local_sgd = isinstance(self.delta, (Change, Distance))
        """True if replicas step on parameters and optimizers of their own."""
        self.per_step = self.delta.micro_steps if isinstance(self.delta, Accumulated) else 1
        """Micro-steps in one step: all of an accumulated gradient's, one of a replica's own optimizer's."""
        self.positions = [ReplicaPosition()] * self.replicas
        """Where each replica begins."""
        self.epochs_before = 0.0
        """Epochs over a training set of another length, before the run was resumed."""
        if job.resume is not None:
            self._resume(job.resume.run)

    def _resume(self, run: RunState) -> None:
        """Begin where another run stopped.

        Where samples are divided as before, each replica goes on in the same order; else the order begins with what the
        begun epochs have left, each sample once. Data of another length begin with a new epoch. Of data that come from
        a function each replica skips as many batches as the one of its number has taken.
        """
        order = self.order
        self.order, same_order = resumed_order(order, run)
        self.positions = resumed_positions(run, self.replicas, self.per_step, same_order=same_order)
        if order is not None and self.order == order and not same_order:
            self.epochs_before = run.spent["epochs"]

    def step_quota(self) -> StepQuota:
        """Return what each replica may spend of the budget."""
        budget, each = self.job.budget, micro_steps(self.delta)
        if budget.amount is None or budget.unit == "seconds":
            return Unbounded(each)
        if budget.unit == "steps":
            left = (int(budget.amount) * self.per_step - position.spent for position in self.positions)
            return Steps([max(0, rest) for rest in left], each)
        assert self.order is not None, "epochs of a data source were not refused"
        position = DataPosition(self.order, tuple(position.batches for position in self.positions))
        samples = (budget.amount - self.epochs_before) * self.order.samples - position.samples
        return Epochs(samples, self.order, each, position.taken)

    def batches(self, replica: ReplicaId) -> Stream:
        """Return the endless stream of one replica's batches, from its first position on."""
        first = self.positions[replica].batches
        return stream(self.job.program, self.order, replica, self.replicas, first)

    @property
    def delta_slots(self) -> int:
        """Return the Δ slots of each replica; 0 where replicas write A in place."""
        return 0 if isinstance(self.delta, InPlace) else self.policy.slots(self.replicas)

    def replica(
        self, replica: ReplicaId, module: nn.Module, layout: FlatLayout, recorder: AnyRecorder = NO_RECORDER
    ) -> Replica:
        """Build the replica that computes Δs of the policy's kind."""
        autograd = Autograd(self.job.program, module, layout, replica, self.device(replica), recorder)
        if isinstance(self.delta, InPlace):
            return WritesInPlace(self.job.program, autograd)
        if isinstance(self.delta, (Gradient, Accumulated)):
            return Single(autograd, micro_steps(self.delta), measure_micro_steps=self.job.noise_scale)
        distance = isinstance(self.delta, Distance)
        return LocalSGD(self.job.program, autograd, self.policy.adopt, distance=distance)

    def device(self, replica: ReplicaId) -> str:
        """Return the device that a replica computes on; GPUs are assigned round robin."""
        if self.job.strategy.device != "cuda":
            return self.job.strategy.device
        return f"cuda:{replica % torch.cuda.device_count()}"


def order_of(job: Job) -> DataOrder | None:
    """Return the data order of a job; None where the data come from the user's function."""
    program, strategy = job.program, job.strategy
    if is_source(program.train):
        return None
    batch_size = program.per_replica_batch(strategy.replicas, strategy.accumulate)
    samples = length(cast(Data, program.train))
    return DataOrder(samples, batch_size, strategy.replicas, program.seed, strategy.partition)


def resumed_order(order: DataOrder | None, run: RunState) -> tuple[DataOrder | None, bool]:
    """Return the data order with which a run goes on, and whether replicas keep their positions in it.

    Args:
        order: of the job, from its beginning.
        run: that goes on.
    """
    before = run.data.order if run.data is not None else None
    if order is None or before is None:
        return order, order is before
    if order == replace(before, resumed=None):
        return replace(before), True  # a new one: the run's state stays small
    return replace(order, resumed=run.data if order.samples == before.samples else None), False


def resumed_positions(run: RunState, replicas: int, per_step: int, *, same_order: bool) -> list[ReplicaPosition]:
    """Return where each replica begins.

    New ones begin after the newest of all counts, so that no seed is drawn and no Δ is named twice. If another number
    of replicas makes the steps, each is taken to have made the mean of them.
    """
    known, held = run.coordinator.positions, run.coordinator.held
    attempt = max([position.attempt for position in known] + [arrival.clock for arrival in held])
    new = ReplicaPosition(max(position.clock for position in known), 0, attempt)
    positions = [*known, *[new] * (replicas - len(known))][:replicas]
    if not same_order:
        positions = [position._replace(batches=0) for position in positions]
    if (run.replicas, run.per_step) != (replicas, per_step):
        positions = [position._replace(spent=round(run.spent["steps"] * per_step)) for position in positions]
    return positions


def first_batch(job: Job) -> Batch:
    """Return the first batch of the training set; raise InputError if reading it fails."""
    order = order_of(job)
    plain = replace(job.program, loader={k: v for k, v in job.program.loader.items() if k == "collate_fn"})
    try:
        with torch.random.fork_rng(devices=[]):
            return next(batch for batch in stream(plain, order, 0, job.strategy.replicas) if batch.samples)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the first batch of train can't be had: {type(error).__name__}: {error}") from error


def first_state(program: Program, running_buffers: tuple[str, ...]) -> tuple[nn.Module, FlatState]:
    """Build the program's module and read A_0 from it."""
    module = program.build()
    return module, read(module, FlatLayout.of(module, running_buffers).new())


def threads(strategy: Strategy, workers_here: int | None = None) -> int:
    """Return the CPU threads of one worker: the strategy's, or an equal share of the cores.

    Args:
        strategy: of the run.
        workers_here: how many workers share this host; None: all.
    """
    return strategy.threads or max(1, len(os.sched_getaffinity(0)) // (workers_here or strategy.workers))


def set_threads_and_seed(job: Job, replica: ReplicaId, workers_here: int | None = None) -> None:
    """Set this process's threads, and its seed by its replica."""
    torch.set_num_threads(threads(job.strategy, workers_here))
    torch.default_generator.manual_seed(step_seed(job.program.seed, replica, -1))  # what samples draw as they are read


def refuse_torchrun(name: str) -> None:
    """Raise InputError if torchrun has started this process, but the engine of this name starts its own."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"engine={name} starts its own processes, but this one was started by torchrun; run it with python, or "
            "write engine='distributed'"
        )


# The rank that shows progress, saves and prints: the first of those that are left.
first_rank = 0


def is_main(engine: str) -> bool:
    """Return whether this process shows progress, saves and prints: of those that torchrun started, one."""
    if engine.partition(":")[0] != "distributed":
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == first_rank
    return int(os.environ.get("RANK", "0")) == first_rank


def refuse_absent_gpu(job: Job) -> None:
    """Raise InputError if the job is for GPUs, but this host has none."""
    device = job.strategy.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={device}, but torch sees no GPU here; write device=cpu")


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Context manager: restore what a run sets in this process, which is the user's."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(before)
