"""What one rank has of A, and how it takes part in the updates: the contract, and the plainest way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import final

from paceline.aggregation import Synchronous
from paceline.comm.compression import parse
from paceline.core.mesh import Place
from paceline.engine.distributed.batchnorm import Meeting, SynchronisedBatchNorm
from paceline.engine.distributed.divided import Divided, only_buffers
from paceline.engine.distributed.exchange import Exchange, Meets
from paceline.engine.distributed.freight import Freight
from paceline.engine.distributed.fully_sharded import FullySharded, Partial
from paceline.engine.distributed.held import all_of
from paceline.engine.distributed.norms import Noise, Norms
from paceline.engine.distributed.overlap import Overlap, overlapped
from paceline.engine.distributed.sharded import Sharded, pays
from paceline.engine.distributed.update import Compressed, Together, Update
from paceline.engine.noise_ledger import NoiseLedger
from paceline.engine.owner import Owner
from paceline.engine.team.circles import Circle
from paceline.engine.team.here import Here
from paceline.engine.team.traffic import ring_bytes
from paceline.replica.autograd import Autograd
from paceline.replica.base import Replica
from paceline.replica.state import State, read
from paceline.trace.recorder import AnyRecorder


class Share(ABC):
    """One rank's.

    Args:
        place: where it is among all workers.
        state: what its replica reads of A.
        freight: what it brings when ranks meet.
        update: its part in each update.
        overlap: what sends Δ during the backward pass; None where it is sent after it.
        meeting: where layers look at all ranks' samples; None where there is no such layer, or nobody else.
        divided: parameters that all ranks have to gather; None: this one has what it needs.
        noise: what is told of it; None: nobody has asked.
    """

    def __init__(
        self,
        place: Place,
        state: State,
        freight: Freight,
        update: Update,
        *,
        overlap: Overlap | None = None,
        meeting: Meeting | None = None,
        divided: Divided | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.place, self.state, self.freight, self.update = place, state, freight, update
        self.overlap, self.meeting, self.divided, self.noise = overlap, meeting, divided, noise

    @property
    @abstractmethod
    def parameter_bytes(self) -> int:
        """Of the parameters that this rank keeps."""

    @property
    @abstractmethod
    def peak_saved_bytes(self) -> int | None:
        """The most that was kept for backward at one time; None: it is not counted."""

    @abstractmethod
    def exchange(self) -> Meets:
        """Where this rank meets the others."""

    @abstractmethod
    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        """What computes Δ here.

        Args:
            weigh: what a Δ of so many samples counts in the sum.
            recorder: of this rank's spans.
        """

    @abstractmethod
    def rules(self) -> Mapping[str, str | int | float]:
        """What a reader of the figures should know."""


@final
class WholeShare(Share):
    """All of A, or of each parameter a part."""

    def __init__(self, here: Here) -> None:
        setup, team = here.setup, here.team
        job, self._module, self._layout = here.setup.job, here.module, here.layout
        whole = read(here.module, here.layout.new())
        divided = None
        if team.traffic is not None and job.strategy.shard_parameters:  # with nobody else there they stay whole
            divided = Divided(here.module, here.layout, team.world.size, team.traffic)
        state = whole if divided is None else only_buffers(whole)
        freight = Freight(state.layout, team.world.size, norms=job.noise_scale)
        update = _update(here, divided, freight, state)
        noise = _noise(here, freight, update) if job.noise_scale else None
        meeting = _meeting(here, divided)
        at_once = isinstance(update, Together) and meeting is None and job.on_nonfinite != "skip"
        if job.noise_scale:  # each gradient is looked at as it is handed over, on the host
            at_once &= job.strategy.accumulate == 1 and job.strategy.device == "cpu"
        overlap = overlapped(job, team, here.backend, freight) if at_once else None
        place = Place(team.world.rank)
        super().__init__(place, state, freight, update, overlap=overlap, meeting=meeting, divided=divided, noise=noise)
        self._setup, self._team = setup, team

    @property
    def parameter_bytes(self) -> int:
        return self._layout.parameter_bytes if self.divided is None else self.divided.nbytes

    @property
    def peak_saved_bytes(self) -> int | None:
        return None

    def exchange(self) -> Meets:
        vectors = self.update.meeting if self.overlap is None else self.freight.tails
        return Exchange(self.freight, vectors, self._team.world.rank, self._team.traffic)

    def replica(self, weigh: Callable[[int], float], recorder: AnyRecorder) -> Replica:
        setup, rank, module = self._setup, self.place.replica, self._module
        if self.divided is None:
            return setup.replica(rank, module, self._layout, recorder)
        autograd = Autograd(setup.job.program, module, self.state.layout, rank, setup.device(rank), recorder)
        return Partial(autograd, self.divided, weigh)

    def rules(self) -> Mapping[str, str | int | float]:
        ranks, size = self._team.world.size, self._layout.parameter_bytes
        rules: dict[str, str | int | float] = {
            "shard_optimizer": isinstance(self.update, Sharded),
            "buckets": self.overlap.buckets if self.overlap is not None else 0,
            "payload_ring_formula_bytes_per_step": ranks * ring_bytes(size, ranks),
        }
        if self.divided is not None:  # gathered for forward, gathered for backward, and gradients summed
            rules["payload_sharded_formula_bytes_per_step"] = 3 * (ranks - 1) * size * self._setup.per_step
        return rules


def _update(here: Here, divided: Divided | None, freight: Freight, state: State) -> Update:
    """How updates are made."""
    job, team, traffic = here.setup.job, here.team, here.team.traffic
    if traffic is not None and divided is not None:
        return FullySharded(job.program, divided, freight, state, traffic)
    if traffic is not None and _divides(here):
        return Sharded(job.program, freight, all_of(state), Circle(traffic, team.world.rank), traffic)
    owner = Owner(job.program, here.setup.policy, state)
    if traffic is None or job.strategy.compression == "none":
        return Together(freight, owner)
    return Compressed(freight, owner, parse(job.strategy.compression), traffic)


def _noise(here: Here, freight: Freight, update: Update) -> Noise:
    assert isinstance(update, Together), "another update was not refused"
    norms = Norms(here.setup.job, freight.state, here.layout.parameter_names, here.layout)
    norms.measure_by(update.stepper)
    return Noise(NoiseLedger(here.setup.reference_batch), norms, lambda _: norms.together())


def _divides(here: Here) -> bool:
    """Whether each rank keeps a part of the optimizer's state."""
    job = here.setup.job
    if job.strategy.shard_optimizer is not None:
        return job.strategy.shard_optimizer
    apart = job.strategy.compression == "none" and job.strategy.device == "cpu" and not job.noise_scale
    return apart and pays(job.program, here.layout, here.backend, here.team.world.size)


def _meeting(here: Here, divided: Divided | None) -> Meeting | None:
    traffic, world = here.team.traffic, here.team.world
    if traffic is None or not any(isinstance(m, SynchronisedBatchNorm) for m in here.module.modules()):
        return None
    policy = here.setup.policy
    added = isinstance(policy, Synchronous) and policy.combine == "sum"
    summed = here.setup.job.strategy.accumulate > 1 or added or divided is not None
    return Meeting(traffic, world.rank, world.size, summed=summed)
