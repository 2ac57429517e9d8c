"""A job resolved for one process: A_0, data order, Δ, each replica's share of the budget, its replicas."""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from paceline.aggregation.base import Aggregation, Need
from paceline.aggregation.state_codec import kind
from paceline.core.data_order import DataOrder, DataPosition, Outstanding
from paceline.core.delta import Accumulated, Change, Delta, Distance, Gradient, InPlace
from paceline.core.errors import InputError
from paceline.core.records import ReplicaPosition
from paceline.core.types import ReplicaId, Seconds
from paceline.device import CPU, OwnGenerators, count, kept_generators, of_worker
from paceline.engine.base import Job
from paceline.engine.batch_dispatcher import BatchDispatcher, Dispatcher, PortionDispatcher
from paceline.engine.budget import Epochs, StepQuota, Steps, Unbounded
from paceline.engine.run_state import ResumePoint, RunState
from paceline.program import Data, Program, is_source, length
from paceline.replica.autograd import NO_RECORDER, Autograd, step_seed
from paceline.replica.base import Batch, Replica, micro_steps
from paceline.replica.batches import BatchSource
from paceline.replica.compilation import CompiledLoss
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.local_sgd import LocalSGD, WritesInPlace
from paceline.replica.own_parameters import Exchange
from paceline.replica.short_steps import ShortStepGraphs
from paceline.replica.single import Single
from paceline.replica.step_graph import StepGraphs
from paceline.strategy import GRAPH, Strategy
from paceline.trace.recorder import AnyRecorder


class RunContext:
    """A job and what follows from it; every process of a run derives the same.

    Args:
        job: of the run.
        has_held: whether this engine has all Δs that the policy held where the run goes on, or can compute them; False:
            if they are in the checkpoint.
    """

    def __init__(self, job: Job, *, has_held: bool = False) -> None:
        strategy, self._has_held = job.strategy, has_held
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
        self.needs = self.policy.needs | ({"loss"} if job.on_losses else frozenset[Need]())
        """Observations that the policy, or the optimizer, needs."""
        reducer = self.policy.reducer
        self.keeps_read = reducer is not None and reducer.reads
        """Whether an update needs the A that the replica of each of its Δs has read."""
        self.local_sgd = isinstance(self.delta, (Change, Distance))
        """True if replicas step on parameters and optimizers of their own."""
        self.per_step = self.delta.micro_steps if isinstance(self.delta, Accumulated) else 1
        """Micro-steps in one step: all of an accumulated gradient's, one of a replica's own optimizer's."""
        self.positions = [ReplicaPosition()] * self.replicas
        """Where each replica begins."""
        streams = self.replicas if self.order is None else self.order.replicas
        self.data = DataPosition(self.order, (0,) * streams)
        """Where the run begins in its data."""
        self.keeps_policy = False
        """Whether the policy goes on with its state, and with the Δs that it held."""
        self._held: tuple[Outstanding, ...] = ()
        """The batches of those."""
        self.same_order = True
        """Whether replicas take their batches in the order in which they took them before the run was resumed."""
        self.own_steps = False
        """Whether a loop of this process computes gradients itself, with an optimizer whose options count."""
        self._compiled: CompiledLoss | StepGraphs | None = None
        self._batches_before = 0
        """Batches that were dealt out in portions, or steps of replicas, before the run was resumed."""
        self.epochs_before = 0.0
        """Epochs over a training set of another length, before the run was resumed."""
        if job.resume is not None:
            self._resume(job.resume)

    def _resume(self, resume: ResumePoint) -> None:
        """Begin where another run stopped.

        Where samples are divided as before, each replica goes on in the same order; else the order begins with what the
        begun epochs have left, each sample once. Data of another length begin with a new epoch. Of data that come from
        a function each replica skips as many batches as the one of its number has taken.
        """
        run, order = resume.run, self.order
        self.keeps_policy = self._can_keep(resume)
        if self.keeps_policy:
            held = run.coordinator.held_names
            self._held = tuple(each for each in run.data.outstanding if (each.replica, each.clock) in held)
        self.data = resumed_data(self.data, run, self.replicas, self._held)
        self.order, self.same_order = self.data.order, same_division(order, run.data.order)
        self._batches_before = round(run.spent["steps"])
        elastic = self.job.strategy.elastic
        self.positions = resumed_positions(run, self.replicas, self.per_step, elastic=elastic)
        if order is not None and self.order == order and not self.same_order:
            self.epochs_before = run.spent["epochs"]

    def _can_keep(self, resume: ResumePoint) -> bool:
        """Return whether the policy can go on with its state: it is of the same kind, and all that it held is there."""
        saved = resume.run.coordinator
        if self.policy.portions is not None:  # the batch that was under way is dealt out anew
            return False
        if saved.policy_kind != kind(self.policy) or (self.keeps_read and saved.held and not self._has_held):
            return False
        held = Counter(arrival.replica for arrival in saved.held)
        # More than a replica's slots hold are those of one that died after a Δ, and came back: only memory bounds them.
        slots = max(held.values(), default=0) if self._has_held else self.policy.slots(self.replicas)
        fits = all(replica < self.replicas and count <= slots for replica, count in held.items())
        return fits and (self._has_held or not held or len(resume.held) == len(saved.held))

    def dispatcher(self) -> Dispatcher:
        """Return what gives replicas their batches, from where the run begins."""
        if self.policy.portions is not None:
            return PortionDispatcher(self._step_quota(), self.data)
        owners = range(0 if self.shares_stream else self.replicas)
        # A replica that writes A in place may be steps ahead of its grant, and knows its next batches by itself.
        hands_on = not isinstance(self.delta, InPlace)
        return BatchDispatcher(self._step_quota(), self.data, owners, self._held, hands_on=hands_on)

    def first_batch(self, replica: ReplicaId) -> int:
        """Return the number of the first batch of a replica's own stream, that it was at work on included."""
        own = (each.batches.first for each in self.data.outstanding if each.replica == replica)
        return min([self.data.taken[replica], *own])

    @property
    def shares_stream(self) -> bool:
        """Return whether no replica has a stream of its own: their number may change, or portions are dealt out."""
        return self.order is not None and (self.job.strategy.elastic or self.policy.portions is not None)

    def _step_quota(self) -> StepQuota:
        """Return what each replica may spend of the budget."""
        budget, each = self.job.budget, micro_steps(self.delta)
        if budget.amount is None or budget.unit == "seconds":
            return Unbounded(each)
        if budget.unit == "steps":
            steps = int(budget.amount) * self.per_step
            if self.policy.portions is not None:  # a step computes all of a batch
                spent = [self._batches_before * self.per_step] * self.policy.portions
            else:
                spent = [position.spent for position in self.positions]
            return Steps([max(0, steps - before) for before in spent], each)
        assert self.order is not None, "epochs of a data source were not refused"
        samples = (budget.amount - self.epochs_before) * self.order.epoch_samples - self.data.samples
        return Epochs(samples, self.order, each)

    def batches(self) -> BatchSource:
        """Return the source of the batches."""
        return BatchSource(self.job.program, self.order, self.replicas)

    @property
    def delta_slots(self) -> int:
        """Return the Δ slots of each replica; 0 where replicas write A in place."""
        return 0 if isinstance(self.delta, InPlace) else self.policy.slots(self.replicas)

    @property
    def one_replica(self) -> bool:
        """Return whether all Δs are of one replica, each computed from the newest A."""
        return self.job.strategy.replicas == 1 and not self.job.strategy.pull_ahead

    @property
    def reads_late(self) -> bool:
        """Return whether the loss of a Δ, and whether it is finite, may be known when the next Δ is complete.

        On a CPU nothing is won. Else nobody may ask before: a loop that is given the loss, a policy that decides on
        what is in a Δ, or who discards what is not finite and goes on; and times are those of the device, if traced.
        """
        job, asked = self.job, bool(self.needs - {"server"})
        asked |= job.loop is not None or job.trace or job.on_nonfinite == "skip"
        plain = isinstance(self.delta, (Gradient, Accumulated))
        return plain and not asked and not job.survives_deaths and job.strategy.device != CPU.type

    def replica(
        self,
        replica: ReplicaId,
        module: nn.Module,
        layout: FlatLayout,
        recorder: AnyRecorder = NO_RECORDER,
        *,
        device: str | None = None,
        late: bool = False,
        graphs_after: Seconds | None = None,
        delta: Callable[[], FlatState] | None = None,
    ) -> Replica:
        """Build the replica that computes Δs of the policy's kind.

        Args:
            replica: its number.
            module: that it trains.
            layout: of A.
            recorder: of its spans.
            device: that it computes on; None: :meth:`device`.
            late: see :attr:`reads_late`.
            graphs_after: time of short steps after which they may be graphs, as nobody looks at the module while it
                trains; None: they are not.
            delta: returns the buffer of the Δ under way, which is the replica's alone; None: it may be read, or sent.
        """
        delta = delta if isinstance(self.delta, Gradient) else None  # else micro-steps are added up, or it is no sum
        autograd = Autograd(self.job.program, module, layout, replica, device or self.device(replica), recorder)
        if compile := self.job.strategy.compile:
            # In virtual time all replicas train one module.
            if self._compiled is None:
                kind: Any = functools.partial(StepGraphs, delta=delta) if compile == GRAPH else CompiledLoss
                self._compiled = autograd.checked(kind, first_batch(self.job), self._batch_sizes(replica))
            if isinstance(self._compiled, StepGraphs):
                autograd.graphs = self._compiled
            else:
                autograd.compiled = self._compiled
        elif graphs_after is not None and self.job.loop is None:
            autograd.graphs = ShortStepGraphs.of(self.job.program, module, autograd.device, graphs_after, delta)
        if isinstance(self.delta, InPlace):
            return WritesInPlace(self.job.program, autograd)
        if isinstance(self.delta, (Gradient, Accumulated)):
            return Single(autograd, micro_steps(self.delta), measure_micro_steps=self.job.noise_scale, late=late)
        exchange = Exchange.of(self.delta, self.policy.adopt, layout, layout)
        return LocalSGD(self.job.program, autograd, exchange, distance=isinstance(self.delta, Distance))

    def _batch_sizes(self, replica: ReplicaId) -> list[int]:
        """Return the sizes of a replica's batches, that of an epoch's last one included; none where nobody knows."""
        order = self.order
        if order is None:
            return []
        streams = range(order.replicas) if self.shares_stream else [replica]
        rounds = {stream: order.batches_of_epoch(stream, order.first_whole_epoch) for stream in streams}
        sizes = dict.fromkeys(order.size(stream, rounds[stream][round_]) for round_ in (0, -1) for stream in streams)
        return [size for size in sizes if size]

    def device(self, replica: ReplicaId) -> str:
        """Return the device that a replica computes on; a host's accelerators are assigned round robin."""
        return str(of_worker(self.job.strategy.device, replica))


def order_of(job: Job) -> DataOrder | None:
    """Return the data order of a job; None where the data come from the user's function."""
    program, strategy = job.program, job.strategy
    if is_source(program.train):
        return None
    portions = strategy.aggregation.portions
    shares = portions or strategy.replicas
    among = "replicas" if portions is None else "portions"
    batch_size = program.per_replica_batch(shares, strategy.accumulate, among)
    samples = length(cast(Data, program.train))
    streams = 1 if strategy.elastic and portions is None else shares
    shuffle, drop_last = program.shuffle is not False, bool(program.drop_last)
    return DataOrder(
        samples, batch_size, streams, program.seed, strategy.partition, shuffle=shuffle, drop_last=drop_last
    )


def same_division(order: DataOrder | None, before: DataOrder | None) -> bool:
    """Return whether two orders divide the same samples alike."""
    if order is None or before is None:
        return order is before
    return order == replace(before, resumed=None)


def resumed_data(start: DataPosition, run: RunState, replicas: int, keeps: Collection[Outstanding]) -> DataPosition:
    """Return where a run goes on in its data.

    Args:
        start: where the job would begin.
        run: that goes on.
        replicas: P.
        keeps: batches whose Δ is there; those of all other outstanding Δs are given out again.
    """
    order, before = start.order, run.data
    again = tuple(each for each in before.outstanding if each not in keeps)
    if same_division(order, before.order):
        # Who was at work on them takes them again.
        staying = set(run.coordinator.computing).intersection(range(replicas))
        held = run.coordinator.held_names
        again = tuple(
            each if each.replica in staying and (each.replica, each.clock) not in held else each._replace(replica=None)
            for each in again
        )
        if order is not None:
            return DataPosition(replace(order), before.taken, again)  # a new one: the run's state stays small
        taken = (*before.taken, *[0] * replicas)[:replicas]
        return DataPosition(None, taken, tuple(each for each in again if each.batches.stream < replicas))
    if order is None or before.order is None or order.samples != before.order.samples:
        return start
    return DataPosition(replace(order, resumed=replace(before, outstanding=again)), start.taken)


def resumed_positions(run: RunState, replicas: int, per_step: int, *, elastic: bool = False) -> list[ReplicaPosition]:
    """Return where each replica begins.

    New ones begin after the newest of all counts, so that no seed is drawn and no Δ is named twice. If another number
    of replicas makes the steps, each is taken to have made the mean of them; where they come and go, those that were
    not there to have made as many as the one with the fewest.
    """
    known, held = run.coordinator.positions, run.coordinator.held
    attempt = max([position.attempt for position in known] + [arrival.clock for arrival in held])
    new = ReplicaPosition(max(position.clock for position in known), attempt)
    positions = [*known, *[new] * (replicas - len(known))][:replicas]
    if elastic and (run.replicas, run.per_step) == (replicas, per_step):
        present = run.coordinator.present
        fewest = min((known[each].spent for each in present), default=max(position.spent for position in known))
        return [p if r in present else p._replace(spent=max(p.spent, fewest)) for r, p in enumerate(positions)]
    dealt = len(run.data.taken) not in (1, run.replicas)  # replicas have each computed any number of portions
    if dealt or (run.replicas, run.per_step) != (replicas, per_step):
        positions = [position._replace(spent=round(run.spent["steps"] * per_step)) for position in positions]
    return positions


def first_batch(job: Job) -> Batch:
    """Return the first batch of the training set; raise InputError if reading it fails."""
    order = order_of(job)
    try:
        with OwnGenerators(job.program.seed):
            return BatchSource(job.program.without_workers(), order, job.strategy.replicas).first()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the first batch of train can't be had: {type(error).__name__}: {error}") from error


def first_state(
    program: Program, running_buffers: tuple[str, ...], device: str | None = None
) -> tuple[nn.Module, FlatState]:
    """Build the program's module and read A_0 from it, onto a device if one is given."""
    module = program.build()
    return module, read(module, FlatLayout.of(module, running_buffers).new(device=device))


def threads(strategy: Strategy, workers_here: int | None = None) -> int:
    """Return the CPU threads of one worker: the strategy's, or an equal share of the cores.

    Args:
        strategy: of the run.
        workers_here: how many workers share this host; None: all.
    """
    return strategy.threads or max(1, len(os.sched_getaffinity(0)) // (workers_here or strategy.workers))


def own_cores(strategy: Strategy) -> bool:
    """Return whether there is a core of this host for each thread of its workers, and one for the main process."""
    return strategy.workers * threads(strategy) < len(os.sched_getaffinity(0))


def set_threads_and_seed(job: Job, replica: ReplicaId, workers_here: int | None = None) -> None:
    """Set this process's threads, unless it has joined by itself and they are its own, and its seed by its replica."""
    if job.strategy.threads is not None or not job.joins:
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


@contextlib.contextmanager
def own_settings(device: str = "cpu") -> Iterator[None]:
    """Context manager: restore what a run on devices of this type sets in this process, which is the user's."""
    before = torch.get_num_threads()
    with kept_generators(of_worker(device, number) for number in range(count(device))):
        try:
            yield
        finally:
            torch.set_num_threads(before)
