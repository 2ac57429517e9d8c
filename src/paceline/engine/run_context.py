"""What every engine does first: A_0, the data order, each replica's share of the budget, its replicas."""

import os
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from paceline.aggregation.base import Aggregation
from paceline.core.data_order import DataOrder
from paceline.core.delta import Accumulated, Change, Delta, Distance, Gradient, InPlace
from paceline.core.errors import InputError
from paceline.core.types import ReplicaId
from paceline.engine.base import Job
from paceline.engine.budget import BudgetMeter, Epochs, StepQuota, Steps, Unbounded
from paceline.program import Data, Program, is_source, length
from paceline.replica.base import Batch, Replica, micro_steps
from paceline.replica.batches import Stream, stream
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.local_sgd import LocalSGD, WritesInPlace
from paceline.replica.single import NO_RECORDER, Autograd, Single, step_seed
from paceline.trace.recorder import AnyRecorder


@dataclass(frozen=True)
class RunContext:
    """A job unfolded; every process of a run unfolds the same one."""

    job: Job
    order: DataOrder | None
    """None where the data come from the user's function."""
    delta: Delta
    """What one push carries, accumulation included."""

    @classmethod
    def of(cls, job: Job) -> "RunContext":
        return cls(job, order_of(job), delta_of(job))

    @property
    def policy(self) -> Aggregation[Any]:
        return self.job.strategy.aggregation

    @property
    def replicas(self) -> int:
        return self.job.strategy.replicas

    @property
    def owns_steps(self) -> bool:
        """Whether replicas walk by themselves, with parameters and optimizers of their own."""
        return isinstance(self.delta, (Change, Distance))

    @property
    def per_step(self) -> int:
        """Micro-steps in one step of a replica: all of an accumulated gradient's, one of its own optimizer's."""
        return self.delta.micro_steps if isinstance(self.delta, Accumulated) else 1

    def allowance(self) -> StepQuota:
        """What each replica may spend."""
        budget, each = self.job.budget, micro_steps(self.delta)
        if budget.amount is None or budget.unit == "seconds":
            return Unbounded(each)
        if budget.unit == "steps":
            return Steps(int(budget.amount), self.replicas, each, self.per_step)
        assert self.order is not None, "epochs of a data source were not refused"
        return Epochs(budget.amount, self.order, each, self.order.samples)

    @property
    def reference_batch(self) -> int | None:
        """m₀: the samples of an update by one replica alone; None where a function makes the batches."""
        return None if self.order is None else self.job.program.per_replica_batch(1)

    def meter(self) -> BudgetMeter:
        """How the budget's use is measured."""
        if self.job.budget.unit == "epochs":
            assert self.order is not None, "epochs of a data source were not refused"
            return BudgetMeter("epochs", self.order.samples)
        return BudgetMeter(self.job.budget.unit, self.replicas * self.per_step)

    def batches(self, replica: ReplicaId) -> Stream:
        """The endless data of one replica."""
        return stream(self.job.program, self.order, replica, self.replicas)

    @property
    def slots(self) -> int:
        """Δ slots of each replica; 0 where replicas write A in place."""
        return 0 if isinstance(self.delta, InPlace) else self.policy.slots(self.replicas)

    def replica(
        self, replica: ReplicaId, module: nn.Module, layout: FlatLayout, recorder: AnyRecorder = NO_RECORDER
    ) -> Replica:
        """The Δ of one replica."""
        autograd = Autograd(self.job.program, module, layout, replica, self.device(replica), recorder)
        if isinstance(self.delta, InPlace):
            return WritesInPlace(self.job.program, autograd)
        if isinstance(self.delta, (Gradient, Accumulated)):
            return Single(autograd, micro_steps(self.delta), measure_micro_steps=self.job.noise_scale)
        distance = isinstance(self.delta, Distance)
        return LocalSGD(self.job.program, autograd, self.policy.adopt, distance=distance)

    def device(self, replica: ReplicaId) -> str:
        """Where a replica computes: GPUs are dealt round robin."""
        if self.job.strategy.device != "cuda":
            return self.job.strategy.device
        return f"cuda:{replica % torch.cuda.device_count()}"


def order_of(job: Job) -> DataOrder | None:
    """The data order of a job."""
    program, strategy = job.program, job.strategy
    if is_source(program.train):
        return None
    batch_size = program.per_replica_batch(strategy.replicas, strategy.accumulate)
    samples = length(cast(Data, program.train))
    return DataOrder(samples, batch_size, strategy.replicas, program.seed, strategy.partition)


def first_batch(job: Job) -> Batch:
    """The first one of the training set; raises InputError where that can't be had."""
    order = order_of(job)
    plain = replace(job.program, loader={k: v for k, v in job.program.loader.items() if k == "collate_fn"})
    try:
        with torch.random.fork_rng(devices=[]):
            return next(batch for batch in stream(plain, order, 0, job.strategy.replicas) if batch.samples)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the first batch of train can't be had: {type(error).__name__}: {error}") from error


def delta_of(job: Job) -> Delta:
    """What a push carries: the policy's Δ, accumulated where the strategy says so."""
    delta = job.strategy.aggregation.delta
    if isinstance(delta, Gradient) and job.strategy.accumulate > 1:
        return Accumulated(job.strategy.accumulate)
    return delta


def first_state(program: Program, running_buffers: tuple[str, ...]) -> tuple[nn.Module, FlatState]:
    """The module as the program makes it, and A_0 read from it."""
    module = program.build()
    return module, read(module, FlatLayout.of(module, running_buffers).new())


def threads(job: Job, here: int | None = None) -> int:
    """CPU threads of one worker: what the strategy says, or an equal share of the cores.

    Args:
        job: of the run.
        here: how many workers share this host; None: all.
    """
    return job.strategy.threads or max(1, len(os.sched_getaffinity(0)) // (here or job.strategy.workers))


def settle(job: Job, replica: ReplicaId, here: int | None = None) -> None:
    """Make this process a replica's: its threads, its seed."""
    torch.set_num_threads(threads(job, here))
    torch.default_generator.manual_seed(step_seed(job.program.seed, replica, -1))  # what samples draw as they are read


def refuse_torchrun(name: str) -> None:
    """Raise InputError where torchrun has started this process, and the engine of this name starts its own."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"engine={name} starts its own processes, but this one was started by torchrun; run it with python, or "
            "write engine='distributed'"
        )


def tells(engine: str) -> bool:
    """Whether this process shows progress, saves and prints: among those that torchrun started rank 0 alone."""
    if engine.partition(":")[0] != "distributed":
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def refuse_absent_gpu(job: Job) -> None:
    """Raise InputError where the job is for GPUs, and this host has none."""
    device = job.strategy.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={device}, but torch sees no GPU here; write device=cpu")
