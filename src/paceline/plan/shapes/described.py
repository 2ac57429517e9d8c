"""What a transformer given as a shape takes and holds on a device: layer by layer, without running any.

::

    block      max(device, host)     device  Σ products (products.py) + bytes of what lies between / memory's bandwidth
                                     host    kernels · what it takes to start one
    embedding  bytes                 looked up, with its gradient
    head       a product and the loss's bytes

Backward makes two products of each of forward's; ``recompute="full"`` runs forward again before it, ``"selective"``
attention's scores alone. Divided among t shards are the matrices, by columns and then by rows, and what lies between
the two; with ``sequence_divided`` what lies between blocks as well.

Sources: what is saved, 2205.05198 section 4; divided products, 1909.08053; the rest of the byte counts are ours, of a
transformer in eager mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import final

from paceline.plan.base import Arrangement, LayerCost, Numerics, Provenance, Workload
from paceline.plan.cluster import Device
from paceline.plan.shapes import blocks, ends
from paceline.plan.shapes.kernels import Kernels, Part
from paceline.plan.shapes.shape import Shape

DATA_SHEET_SPREAD = 0.37
"""Nine of ten of 268 published runs on GPUs lay within this of what data sheets and shapes say, at most 1.37 times
as long or as short (benchmarks/planner/calibration.md)."""


@final
@dataclass(frozen=True)
class DescribedWorkload(Workload):
    """A shape, how it is trained, and on what.

    Args:
        shape: of the model.
        device: at the precision that it is trained in.
        global_batch: samples of a step.
        precision: ``fp32``, ``tf32``, or else mixed: ``bf16-mixed``, ``fp16-mixed``, ``fp8-mixed``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        kernels: how well the device's numbers are made use of.

    >>> from paceline.plan.clusters.devices import device
    >>> gpt2 = DescribedWorkload(Shape(12, 768, 12, name="gpt2"), device("A100-80GB"), global_batch=64)
    >>> [layer.name for layer in gpt2.layers(Arrangement(replicas=8, micro_batch=8))][:3]
    ['embedding', 'block', 'block']
    """

    shape: Shape
    device: Device
    global_batch: int = 1
    precision: str = "bf16-mixed"
    optimizer: str = "adam"
    kernels: Kernels = field(default_factory=Kernels)
    held_as: Numerics | None = None
    """Bytes for each parameter; None: by precision and optimizer."""
    spread: float = DATA_SHEET_SPREAD
    """Nothing of it was measured."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The shape's, or its sizes."""
        return self.shape.name or f"{self.shape.layers}x{self.shape.hidden}"

    @property
    def sample_words(self) -> int:  # type: ignore[override]
        """Its sequence."""
        return self.shape.sequence

    @cached_property
    def numerics(self) -> Numerics:  # type: ignore[override]
        """Of precision and optimizer."""
        return self.held_as or Numerics.of(self.precision, self.optimizer)

    @property
    def provenance(self) -> Provenance:  # type: ignore[override]
        """Of times and bytes."""
        return {
            "layers' times": "computed from the shape and the device's data sheet; nothing of it was measured",
            "activations": "counted as in 2205.05198, section 4",
            "spread": "nine of ten of 268 published runs lay within this factor of what data sheets alone say",
        }

    def flops(self) -> float:
        return self.shape.flops

    def refusal(self, arrangement: Arrangement) -> str | None:
        shape, t = self.shape, arrangement.shards
        keys = shape.kv_heads or shape.heads
        if shape.heads % t or (keys % t and t % keys):
            return f"{shape.heads} heads ({keys} of keys) are not divisible by {t} shards"
        if shape.width % t or (arrangement.sequence_divided and shape.sequence % t):
            return f"ffn {shape.width} or sequence {shape.sequence} is not divisible by {t} shards"
        if arrangement.stages * arrangement.chunks > shape.layers + 2:
            return f"{shape.layers + 2} layers are fewer than {arrangement.stages * arrangement.chunks} parts"
        return None

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        element_bytes = 4 if self.precision in ("fp32", "tf32") else 2
        part = Part(
            arrangement.micro_batch / arrangement.context,
            arrangement.shards,
            arrangement.recompute,
            arrangement.sequence_divided and arrangement.shards > 1,
            element_bytes,
            _SCORES.get(self.precision, 1.0),
            mask_bytes=element_bytes if self.device.kind == "cpu" else 1,
            cast_bytes=_CAST.get(self.precision, 0),
        )
        return _layers(self.shape, self.device, self.kernels, part)


_SCORES = {"fp8-mixed": 0.5, "fp4-mixed": 0.25}
_CAST = {"fp8-mixed": 2, "fp4-mixed": 1}
"""Once as it is and once transposed, for the products of backward."""


@lru_cache(maxsize=1024)
def _layers(shape: Shape, device: Device, kernels: Kernels, part: Part) -> tuple[LayerCost, ...]:
    """Blocks are one object, so that whoever adds them up may count it."""
    block = blocks.block(shape, device, kernels, part)
    first, last = ends.embedding(shape, device, kernels, part), ends.head(shape, device, kernels, part)
    return (first, *(block,) * shape.layers, last)
