"""A transformer given as a shape: read from a TOML file, and its cost layer by layer without running the model.

The file has the model's sizes and how it is trained::

    [model]
    layers = 12
    hidden = 768
    heads = 12
    vocab = 50257
    sequence = 1024

    [train]
    global_batch = 64
    precision = "bf16"
    optimizer = "adamw"

Bytes of a parameter, by precision and optimizer::

    bf16, fp16        2 in half, 4 of its gradient, 4 in full precision, and the optimizer's
    fp32, tf32        4, 4 of its gradient, and the optimizer's
    adam, adamw 8     momentum 4     sgd 0

The cost of a layer on one device::

    block      max(device, host)     device  Σ products (gemm_time.py) + bytes between products / memory's bandwidth
                                     host    kernels · seconds to start one
    embedding  bytes                 looked up, with its gradient
    head       a product and the loss's bytes

Backward makes two products of each of forward's; ``recompute="full"`` runs forward again before it, ``"selective"``
attention's scores alone. Divided among t shards are the matrices, by columns and then by rows, and the activations
between the two; with ``sequence_divided`` those between blocks as well.

Sources: saved activations, 2205.05198 section 4; divided products, 1909.08053; the rest of the byte counts are ours, of
a transformer in eager mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import final

from paceline.core.errors import InputError, unknown
from paceline.core.toml_sections import checked, refuse_unknown, section, text_of, toml
from paceline.planner import devices
from paceline.planner.base import Arrangement, LayerCost, Numerics, Provenance, Workload
from paceline.planner.cluster import Device
from paceline.planner.shapes.blocks import RankShare, TransformerCosts
from paceline.planner.shapes.gemm_time import DeviceEfficiency
from paceline.planner.shapes.shape import Shape

# Nine of ten of 268 published runs on GPUs lay within this of what data sheets and shapes say, at most 1.37 times
# as long or as short (benchmarks/planner/calibration.md). Devices of which rows say more have a wider one in TAUGHT.
DATA_SHEET_SPREAD = 0.37

# Sources of times and bytes of a described workload.
SOURCES: Provenance = {
    "layers' times": "computed from the shape and the device's data sheet; nothing of it was measured",
    "activations": "counted as in 2205.05198, section 4",
    "spread": "nine of ten of 268 published runs lay within this factor of what data sheets alone say, or those of the "
    "device in a wider one",
}


@final
@dataclass(frozen=True)
class DescribedWorkload(Workload):
    """A workload from a shape, how it is trained, and its device.

    Args:
        shape: of the model.
        device: at the precision that it is trained in.
        global_batch: samples of a step.
        precision: ``fp32``, ``tf32``, or else mixed: ``bf16-mixed``, ``fp16-mixed``, ``fp8-mixed``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        kernels: efficiency of the device relative to its data sheet.

    >>> from paceline.planner.devices import device
    >>> gpt2 = DescribedWorkload(Shape(12, 768, 12, name="gpt2"), device("A100-80GB"), global_batch=64)
    >>> [layer.name for layer in gpt2.layers(Arrangement(replicas=8, micro_batch=8))][:3]
    ['embedding', 'block', 'block']
    """

    shape: Shape
    device: Device
    global_batch: int = 1
    precision: str = "bf16-mixed"
    optimizer: str = "adam"
    kernels: DeviceEfficiency = field(default_factory=DeviceEfficiency)
    parameter_bytes: Numerics | None = None
    """Bytes of a parameter; None: by precision and optimizer."""
    spread: float = DATA_SHEET_SPREAD
    """Relative spread of the predicted times, of which none is measured."""
    provenance = SOURCES

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the shape, or its sizes."""
        return self.shape.name or f"{self.shape.layers}x{self.shape.hidden}"

    @property
    def flops(self) -> float:  # type: ignore[override]
        """Operations of the shape for one sample."""
        return self.shape.flops

    @cached_property
    def numerics(self) -> Numerics:  # type: ignore[override]
        """Bytes of a parameter by precision and optimizer."""
        return self.parameter_bytes or Numerics.of(self.precision, self.optimizer)

    def refusal(self, arrangement: Arrangement) -> str | None:
        shape, t = self.shape, arrangement.shards
        keys = shape.kv_heads or shape.heads
        if shape.heads % t or (keys % t and t % keys):
            # with more shards than key heads, each key head is copied to t / keys shards
            return f"{shape.heads} heads ({keys} of keys) are not divisible by {t} shards"
        if shape.width % t or (arrangement.sequence_divided and shape.sequence % t):
            return f"ffn {shape.width} or sequence {shape.sequence} is not divisible by {t} shards"
        if arrangement.stages * arrangement.chunks > shape.layers + 2:
            # embedding and head count as layers
            return f"{shape.layers + 2} layers are fewer than {arrangement.stages * arrangement.chunks} parts"
        return None

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        a, element_bytes = arrangement, 4 if self.precision in ("fp32", "tf32") else 2
        rate, cast_bytes = _SCORES.get(self.precision, 1.0), _CAST.get(self.precision, 0)
        mask_bytes = element_bytes if self.device.kind == "cpu" else 1
        of_worker = a.micro_batch / a.context, a.shards, a.recompute, a.sequence_divided and a.shards > 1
        part = RankShare(*of_worker, element_bytes, rate, mask_bytes, cast_bytes)
        return _layers(TransformerCosts(self.shape, self.device, self.kernels, part))


# Rate of attention's products, which stay at 16 bits, relative to the others.
_SCORES = {"fp8-mixed": 0.5, "fp4-mixed": 0.25}
# Bytes per element of a product's cast input: once as it is and once transposed, for the products of backward.
_CAST = {"fp8-mixed": 2, "fp4-mixed": 1}


@lru_cache(maxsize=1024)
def _layers(costs: TransformerCosts) -> tuple[LayerCost, ...]:
    """Return the layers' costs; all blocks are one object, so that sums over layers may count it instead."""
    return (costs.embedding(), *(costs.block(),) * costs.shape.layers, costs.head())


PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp8-mixed", "fp4-mixed")
OPTIMIZERS = ("sgd", "momentum", "adam")

# Other words for the same. A model "in bf16" is trained in mixed precision: products in 16 bits, gradients, moments and
# the parameters that are updated in 32 (1710.03740). AdamW (1711.05101) keeps what Adam keeps.
_BITS: Mapping[str, str] = {short: f"{short}-mixed" for short in ("bf16", "fp16", "fp8", "fp4")}
SYNONYMS: Mapping[str, str] = {**_BITS, "adamw": "adam"}


@dataclass(frozen=True, slots=True)
class ShapeJob:
    """The contents of a shape file.

    >>> text = "[model]\\nlayers = 2\\nhidden = 8\\nheads = 2\\n[train]\\nglobal_batch = 4"
    >>> ShapeJob.from_toml(text).shape.parameters
    412008
    """

    shape: Shape
    global_batch: int
    precision: str = "bf16-mixed"
    """One of :data:`PRECISIONS`."""
    optimizer: str = "adam"
    """One of :data:`OPTIMIZERS`."""

    @classmethod
    def from_toml(cls, text: str, name: str = "") -> "ShapeJob":
        """Parse the text of a shape file.

        Raises:
            InputError: no TOML, an unknown or missing key, a value of another type or out of its range.
        """
        sections = toml(text)
        refuse_unknown("section", sections, ("model", "train"))
        model, train = section(sections, "model"), section(sections, "train")
        shape = Shape(**{"name": name} | checked(Shape, model, "model"))
        train = checked(cls, {"shape": {}} | train, "train")
        words = {key: SYNONYMS.get(train[key], train[key]) for key in ("precision", "optimizer") if key in train}
        return cls(**train | words | {"shape": shape})

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"global_batch = {self.global_batch}: a step has at least one sample; write 1 or more.")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, (*PRECISIONS, *_BITS))
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, (*OPTIMIZERS, "adamw"))

    def workload(self, device: Device) -> DescribedWorkload:
        """Return the workload on a device; a device of the catalogue is taken at this precision."""
        if device.name in devices.SHEETS:
            device = devices.device(device.name, self.precision)
        kernels, taught, spread = DeviceEfficiency(), devices.taught(device.name), DATA_SHEET_SPREAD
        if taught:
            kernels = replace(kernels, products=taught.rate * kernels.products)
            spread = max(spread, taught.spread)
        training = self.global_batch, self.precision, self.optimizer
        return DescribedWorkload(self.shape, device, *training, kernels, spread=spread)


def read(path: Path) -> ShapeJob:
    """Read a shape file.

    Raises:
        InputError: it can't be read, or see :meth:`ShapeJob.from_toml`.
    """
    return ShapeJob.from_toml(text_of(path), path.stem)
