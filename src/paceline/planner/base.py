"""How a framework goes about a step: what its own numbers don't say.

The words of this folder: what is planned, and what a plan says.

::

    Workload     what is trained: a chain of layers, with times, parameters and bytes of each
    Cluster      what it is trained on                                                            cluster.py
    Arrangement  how it is divided: what a Strategy says, with every size filled in
    Cost         what a step then takes and holds, term by term                                   cost.py
    Plan         an arrangement with its cost, and the Strategy that train takes                  search.py

Letters: p stages, t shards, R replicas, v chunks of the model on each worker of a pipeline, m micro-batches of one
replica in a step, b samples in one of them. Nothing here imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from paceline.core.types import Seconds
from paceline.strategy import Strategy


@dataclass(frozen=True, slots=True)
class OverlapModel:
    """How a framework goes about it: what a calibration fits, and what is measured on a host."""

    overlap: float = 0.0
    """Of summing over replicas: the part of backward, or for divided parameters of both passes, that it may hide in."""
    send_overlap: float = 0.0
    """The part of messages between stages that is hidden, of those that don't fill or empty the pipeline."""
    step_s: Seconds = 0.0
    """What each step takes beside all else."""
    micro_batch_s: Seconds = 0.0
    """What each micro-batch takes beside all else: its data, its loss, the framework's own work."""
    context_bytes: float = 0.0
    """What a worker's runtime holds."""
    fragmentation: float = 1.0
    """What activations and buffers really take, by what they are."""
    added_moves: float = 3.0
    """How many times each Δ of a step beyond the first moves its bytes: both are read and one is written; 0 where the
    product that makes it adds it (Megatron-LM's ``gradient_accumulation_fusion``)."""


Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

Recomputed: TypeAlias = Literal["none", "selective", "full", "stage"]
"""Which activations are computed again in backward: none; those of attention's scores; all within a layer; all within
a stage, which keeps what came into it. The last is made of the first by cost.py: workloads are not asked for it."""

Provenance: TypeAlias = Mapping[str, str]
"""What a number is called -> where it comes from: "measured here, 9 repeats", "data sheet", "assumed"."""


def merged(*told: Provenance) -> dict[str, str]:
    """All of them; what several say of one name stands side by side.

    >>> merged({"spread": "assumed", "links": "data sheet"}, {"spread": "measured"}, {"links": "data sheet"})
    {'spread': 'assumed; measured', 'links': 'data sheet'}
    """
    found: dict[str, list[str]] = {}
    for each in told:
        for name, source in each.items():
            said = found.setdefault(name, [])
            said.extend([source] if source not in said else [])
    return {name: "; ".join(said) for name, said in found.items()}


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that all shards of a layer take part in for one micro-batch."""

    collective: Collective
    size_bytes: int
    """Of the tensor that all of them have before an all_reduce, or after an all_gather."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one layer for one micro-batch on one worker, which has one of its shards.

    Recomputation, where there is any, is in ``backward_s`` and ``backward_calls``.
    """

    name: str
    forward_s: Seconds
    backward_s: Seconds
    parameters: int
    """Elements of the shard."""
    saved_bytes: int
    """What is kept from forward to backward."""
    output_bytes: int
    """What goes on to the next layer: what a stage that ends here sends, and gets the gradient of."""
    working_bytes: int = 0
    """What is there for a while beside what is saved: recomputed activations, gradients of activations."""
    forward_calls: tuple[Call, ...] = ()
    backward_calls: tuple[Call, ...] = ()
    tied: str = ""
    """Layers of one non-empty name share their parameters: on one stage they count once, on two they are summed."""
    idle_s: Seconds = 0.0
    """Of both passes: what the device waits for its host to start kernels, in which collectives are not seen."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Bytes for each parameter, by what they are for.

    >>> Numerics.of("fp32", "adam"), Numerics.of("bf16-mixed", "adam").total
    (Numerics(parameter=4, gradient=4, optimizer=8), 18)
    """

    parameter: float = 4
    gradient: float = 4
    optimizer: float = 0
    """Moments, and a copy of the parameters in full precision where training is mixed."""

    @classmethod
    def of(cls, precision: str, optimizer: str) -> "Numerics":
        """Of names: ``fp32``, or else mixed (two bytes, with a copy and gradients of four); ``sgd``, ``momentum`` or
        ``adam``."""
        moments = {"sgd": 0, "momentum": 4}.get(optimizer, 8)
        return cls(4, 4, moments) if precision in ("fp32", "tf32") else cls(2, 4, 4 + moments)

    @property
    def total(self) -> float:
        """Of all."""
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a step is divided among workers."""

    replicas: int = 1
    stages: int = 1
    shards: int = 1
    chunks: int = 1
    micro_batch: float = 1
    """b, samples; not whole where a few rows say so."""
    micro_batches: int = 1
    """m, of a whole step of a replica."""
    schedule: str = "1f1b"
    copies: tuple[int, ...] = ()
    """Columns that take turns at each stage; empty: one at each."""
    divided: int = 0
    """ZeRO's number: 1 the optimizer's state is divided among replicas, 2 gradients as well, 3 parameters as well."""
    recompute: Recomputed = "none"
    sequence_divided: bool = False
    """Whether what lies between divided operators is divided among shards as well, along the sequence."""
    next_to_shards: Literal["stages", "replicas"] = "stages"
    """What comes next to shards on a host: Paceline puts the stages of a replica there, others replicas of a stage."""
    context: int = 1
    """Workers that divide a sequence among them beside all else; with :attr:`experts`, for published rows alone."""
    experts: int = 1
    """Among how many replicas experts are divided."""
    accumulated: int = 1
    """Mini-batches of a pipeline's step, each of which fills and empties it anew: they have m together."""
    stage_shards: tuple[int, ...] = ()
    """Shards of each stage, where they differ: :attr:`shards` is then the most of them; empty: all alike."""

    @property
    def replica_workers(self) -> int:
        """Of one replica."""
        if not self.stage_shards:
            return self.shards * (sum(self.copies) if self.copies else self.stages)
        return sum(n * t for n, t in zip(self.copies or (1,) * self.stages, self.stage_shards, strict=True))

    @property
    def workers(self) -> int:
        """All of them."""
        return self.replicas * self.context * self.replica_workers

    @property
    def samples(self) -> float:
        """Of a step, all replicas together."""
        return self.replicas * self.micro_batches * self.micro_batch


class Workload(ABC):
    """A model and how it is trained, as costs see it."""

    name: str
    global_batch: int
    """Samples of a step."""
    numerics: Numerics
    sample_words: int
    """Tokens in a sample; 1 where samples have none."""
    provenance: Provenance
    spread: float
    """How far, relatively, a predicted time may lie off, for nine of ten; :attr:`provenance` says why."""

    @abstractmethod
    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        """What is cut into stages, in order; depends on b, shards and recomputation alone."""

    @abstractmethod
    def refusal(self, arrangement: Arrangement) -> str | None:
        """Why it can't be divided so, as a clause; None: it can."""

    @abstractmethod
    def flops(self) -> float | None:
        """Floating-point operations of the model itself for one sample, forward and backward, none counted twice."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker holds at the most, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Of messages and collectives, and what layers need for a while."""
    context: float
    """Of the runtime: libraries, allocator, device context."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.context


TERMS = ("compute", "shards", "bubble", "stages", "replicas", "optimizer", "waiting")
"""Of a step: computing of the busiest stage, collectives of its shards, waiting for the pipeline to fill and empty,
messages between stages, what is left to see of summing over replicas, the update, waiting for stragglers."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step."""

    terms: Mapping[str, Seconds]
    """One entry for each of :data:`TERMS`; what overlaps with computing is not in them."""
    held: tuple[Held, ...]
    """One for each stage."""
    sent_bytes: Mapping[str, float]
    """By a worker, at the most: to ``shards``, ``stages``, ``replicas``."""
    cut: tuple[int, ...] = ()
    """The first layer of each stage after the first."""
    staleness: float = 0.0
    """Updates between reading A and applying Δ, mean over A's elements; above 0 where stages don't wait for a flush."""

    @property
    def step_s(self) -> Seconds:
        """All terms."""
        return sum(self.terms.values())

    @property
    def most(self) -> Held:
        """Of the worker that holds the most."""
        return max(self.held, key=lambda held: held.total)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to train, and what it will take."""

    arrangement: Arrangement
    cost: Cost
    low_s: Seconds
    high_s: Seconds
    """Nine of ten measured steps are to lie between them."""
    samples_per_s: float
    utilisation: float | None
    """Of the devices' floating-point operations; None where a model's are not known."""
    strategy: Strategy | None = None
    """What train takes; None: Paceline does not run it."""
    simulated: bool = False
    """Whether bubble and waiting come from the simulated schedule rather than a closed form."""
    provenance: Provenance = field(default_factory=dict[str, str])
    why_not: str = ""
    """Why another one was preferred; empty for the best."""
