"""Records of the planner: what is trained, how a step is divided among workers, and what that costs.

::

    Workload     what is trained: a chain of layers, with times, parameters and bytes of each
    Cluster      what it is trained on                                                            cluster.py
    Arrangement  how a step is divided: a Strategy with every size filled in
    Cost         time and memory of such a step, term by term                                     cost.py
    Plan         an arrangement with its cost, and the Strategy that train takes                  search/

Letters: p stages, t shards, R replicas, v chunks of the model on each worker of a pipeline, m micro-batches of one
replica in a step, b samples in one of them. Nothing here imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from paceline.core.types import Seconds
from paceline.strategy import Strategy

if TYPE_CHECKING:
    from paceline.planner.served_plans import Servers


@dataclass(frozen=True, slots=True)
class OverlapModel:
    """Overlap, overheads and memory of a framework's runtime: fitted by a calibration or measured on a host."""

    overlap: float = 0.0
    """Share of backward (with divided parameters: of both passes) that the sum over replicas may overlap with."""
    send_overlap: float = 0.0
    """Share of messages between stages that is overlapped, of those that don't fill or empty the pipeline."""
    step_s: Seconds = 0.0
    """Fixed overhead of a step."""
    micro_batch_s: Seconds = 0.0
    """Fixed overhead of a micro-batch: its data, its loss, the framework's own work."""
    context_bytes: float = 0.0
    """Memory of a worker's runtime."""
    fragmentation: float = 1.0
    """Factor from the bytes of activations and buffers to the memory that they take."""
    added_moves: float = 3.0
    """Times that each Δ of a step beyond the first moves its bytes: both are read and one is written; 0 where the
    product that computes it accumulates in place (Megatron-LM's ``gradient_accumulation_fusion``)."""


Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

# Activations that backward recomputes: none; those of attention's scores; all within a layer; all within a stage,
# which keeps its input. The last is derived from the first by stage_division.py: workloads need not support it.
Recomputed: TypeAlias = Literal["none", "selective", "full", "stage"]

# Name of a number -> its source: "measured here, 9 repeats", "data sheet", "assumed".
Provenance: TypeAlias = Mapping[str, str]


def merged(*parts: Provenance) -> dict[str, str]:
    """Return the union; several sources of one name are joined.

    >>> merged({"spread": "assumed", "links": "data sheet"}, {"spread": "measured"}, {"links": "data sheet"})
    {'spread': 'assumed; measured', 'links': 'data sheet'}
    """
    result: dict[str, dict[str, None]] = {}
    for part in parts:
        for name, source in part.items():
            result.setdefault(name, {})[source] = None
    return {name: "; ".join(sources) for name, sources in result.items()}


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


class Call(NamedTuple):
    """A collective of all shards of a layer for one micro-batch."""

    collective: Collective
    size_bytes: int
    """Size of the tensor that each shard has before an all_reduce, or after an all_gather."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer for one micro-batch on one worker, which has one of its shards.

    Recomputation, where there is any, is in ``backward_s`` and ``backward_calls``.
    """

    name: str
    forward_s: Seconds
    backward_s: Seconds
    parameters: int
    """Elements of the shard."""
    saved_bytes: int
    """Activations kept from forward to backward."""
    output_bytes: int
    """Output to the next layer: a stage that ends here sends so much, and receives the gradient of it."""
    working_bytes: int = 0
    """Temporary memory in addition to the activations: recomputed ones, gradients of activations."""
    forward_calls: tuple[Call, ...] = ()
    backward_calls: tuple[Call, ...] = ()
    tied: str = ""
    """Layers of one non-empty name share their parameters: on one stage they count once, on two they are summed."""
    idle_s: Seconds = 0.0
    """Time of both passes that the device waits for its host to launch kernels; collectives overlap with it."""
    backward_bytes: int = 0
    """Gradients while its backward runs: of its output, its input, and its parameters until they are added to Δ.

    They are in addition to the activations of the layers up to this one; those of later layers are free by then."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Bytes for each parameter, by purpose.

    >>> Numerics.of("fp32", "adam"), Numerics.of("bf16-mixed", "adam").total
    (Numerics(parameter=4, gradient=4, optimizer=8), 18)
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 0
    """Moments, and a copy of the parameters in full precision where training is mixed."""

    @classmethod
    def of(cls, precision: str, optimizer: str) -> "Numerics":
        """Look up by name: ``fp32``, or else mixed (two bytes, with a copy and gradients of four); ``sgd``,
        ``momentum`` or ``adam``."""
        moments = {"sgd": 0, "momentum": 4}.get(optimizer, 8)
        return cls(4, 4, moments) if precision in ("fp32", "tf32") else cls(2, 4, 4 + moments)

    @property
    def total(self) -> float:
        """Bytes of a parameter with its gradient and its optimizer's state."""
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Division of a step among workers."""

    replicas: int = 1
    stages: int = 1
    shards: int = 1
    chunks: int = 1
    micro_batch: float = 1
    """b, samples; not whole where a few published rows say so."""
    micro_batches: int = 1
    """m, of a whole step of a replica."""
    schedule: str = "1f1b"
    copies: tuple[int, ...] = ()
    """Replicas of each stage, which process its micro-batches in turn; empty: one of each."""
    divided: int = 0
    """ZeRO's stage: 1 the optimizer's state is divided among replicas, 2 gradients as well, 3 parameters as well."""
    recompute: Recomputed = "none"
    sequence_divided: bool = False
    """True if activations between divided operators are divided among shards as well (sequence parallelism)."""
    next_to_shards: Literal["stages", "replicas"] = "stages"
    """Order of ranks on a host: Paceline places the stages of a replica next to each other, others its replicas."""
    context: int = 1
    """Context parallelism: workers that divide a sequence; like :attr:`experts`, for published rows alone."""
    experts: int = 1
    """Expert parallelism: replicas among which experts are divided."""
    accumulated: int = 1
    """Mini-batches of a pipeline's step, each of which fills and empties it anew: they have m together."""
    stage_shards: tuple[int, ...] = ()
    """Shards of each stage, where they differ: :attr:`shards` is then their maximum; empty: all the same."""

    @property
    def stage_replicas(self) -> Sequence[int]:
        """Replicas of each stage."""
        return self.copies or (1,) * self.stages

    @property
    def shards_by_stage(self) -> Sequence[int]:
        """Shards of each stage."""
        return self.stage_shards or (self.shards,) * self.stages

    @property
    def replica_workers(self) -> int:
        """Workers of one replica."""
        if not self.stage_shards:
            return self.shards * (sum(self.copies) if self.copies else self.stages)
        return sum(n * t for n, t in zip(self.stage_replicas, self.stage_shards, strict=True))

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.replicas * self.context * self.replica_workers

    @property
    def samples(self) -> float:
        """Samples of a step, all replicas together."""
        return self.replicas * self.micro_batches * self.micro_batch

    @property
    def mini_batch(self) -> int:
        """Micro-batches between two flushes of the pipeline."""
        return self.micro_batches // self.accumulated

    def own_micro_batches(self, stage: int) -> int:
        """a ⌈m / (a n_j)⌉: micro-batches of a step that the first replica of stage j processes."""
        return self.accumulated * ceil(self.mini_batch / self.stage_replicas[stage])

    def parameter_replicas(self, stage: int) -> int:
        """Workers that have the same parameters: the stage's replicas of each replica of the model."""
        return self.replicas * self.context * self.stage_replicas[stage]

    def with_shards(self, shards: int) -> "Arrangement":
        """The same arrangement with so many shards of each stage: layers depend on the shards of their own stage."""
        if self.shards == shards and not self.stage_shards:
            return self
        return replace(self, shards=shards, stage_shards=())


class Workload(ABC):
    """A model and its training, as a cost model sees them."""

    name: str
    global_batch: int
    """Samples of a step."""
    numerics: Numerics
    provenance: Provenance
    spread: float
    """Relative error of a predicted time that nine of ten stay below; :attr:`provenance` says why."""
    flops: float | None
    """Floating-point operations of the model for one sample, forward and backward, none counted twice."""

    @abstractmethod
    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        """Return the layers to cut into stages, in order; they depend on b, shards and recomputation alone."""

    @abstractmethod
    def refusal(self, arrangement: Arrangement) -> str | None:
        """Return why the model can't be divided so, as a clause; None: it can."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Peak memory of a worker, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Buffers of messages and collectives, and temporary memory of layers."""
    context: float
    """Memory of the runtime: libraries, allocator, device context."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.context


# Terms of a step: compute of the busiest stage, collectives of its shards, waiting for the pipeline to fill and empty,
# messages between stages, exposed part of the sum over replicas, the update, waiting for stragglers.
TERMS = ("compute", "shards", "bubble", "stages", "replicas", "optimizer", "waiting")


@dataclass(frozen=True, slots=True)
class Cost:
    """Time, memory and traffic of one step."""

    terms: Mapping[str, Seconds]
    """One entry for each of :data:`TERMS`; communication that overlaps with compute is not included."""
    memory: tuple[WorkerMemory, ...]
    """Memory of a worker of each stage."""
    sent_bytes: Mapping[str, float]
    """Bytes that the worker sends that sends most: to ``shards``, ``stages``, ``replicas``."""
    cut: tuple[int, ...] = ()
    """The first layer of each stage after the first."""
    staleness: float = 0.0
    """Updates between reading A and applying Δ, mean over A's elements; above 0 where stages don't wait for a flush."""

    @property
    def step_s(self) -> Seconds:
        """Seconds of the step: the sum of all terms."""
        return sum(self.terms.values())

    @property
    def peak(self) -> WorkerMemory:
        """Memory of the worker that needs most."""
        return max(self.memory, key=lambda memory: memory.total)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A way to train, with its predicted time and memory; at a prompt one line."""

    arrangement: Arrangement
    cost: Cost
    low_s: Seconds
    high_s: Seconds
    """Bounds of the interval that is to contain nine of ten measured steps."""
    samples_per_s: float
    utilisation: float | None
    """Share of the devices' floating-point operations; None where the model's are not known."""
    strategy: Strategy | None = None
    """The Strategy that train takes; None: Paceline does not support it."""
    simulated: bool = False
    """True if bubble and waiting come from the simulated schedule rather than a closed form."""
    provenance: Provenance = field(default_factory=dict[str, str])
    why_not: str = ""
    """Why another plan was preferred; empty for the best."""
    servers: "Servers | None" = None
    """Servers of A, where the strategy is for the Ray engine; None: the replicas have A."""

    def __repr__(self) -> str:
        reason = f"; {self.why_not}" if self.why_not else ""
        return f"<Plan {self.strategy or self.arrangement}: {self.figures()}{reason}>"

    def figures(self) -> str:
        """Return the time of a step with its interval, the rate, and the largest memory of a worker, as text."""
        step = f"{self.cost.step_s * 1e3:.3g} ms ({self.low_s * 1e3:.3g} to {self.high_s * 1e3:.3g})"
        return f"{step}, {self.samples_per_s:,.0f} samples/s, {self.cost.peak.total / 2**20:,.0f} MiB at the most"
