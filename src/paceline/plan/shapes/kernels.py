"""How well a device is made use of, and what part of a micro-batch one worker has: what a shape's layers hang on."""

from dataclasses import dataclass

from paceline.core.types import Seconds


@dataclass(frozen=True, slots=True)
class Kernels:
    """How well a device's numbers are made use of, and how a model runs there.

    The first three are of 72 products on an H100; bytes, host and call are near what 181 runs of Megatron-DeepSpeed on
    A100 teach (benchmarks/planner: messages.md, calibration.md).
    """

    products: float = 0.8
    """P∞ as a part of the data sheet's operations."""
    product_start_s: Seconds = 5.8e-6
    waits: float = 0.19
    """q of the last wave of a product."""
    bytes: float = 0.8
    """The part of memory's bandwidth that what lies between products gets."""
    host_s: Seconds = 2.5e-5
    """What a host takes to start a kernel."""
    call_s: Seconds = 2e-4
    """What hosts wait for each other at a collective of 8 shards; it grows with the third power of shards."""
    fused_scores: bool = True
    """Whether attention never writes its scores: flash attention (2205.14135)."""
    scores: float = 0.6
    """What its products get of the others' rate then: its backward makes five for two of forward, a causal mask spares
    half of them."""
    unaligned: float = 1 / 16
    """What attention's products get where a head's size is no multiple of 8: an A100 without its tensor cores, 19.5 of
    312 Tflop/s. Of 1, 1/5, 1/10 and 1/16 it fits BigScience's runs with heads of 108 and 180 best."""
    every_second: bool = False
    """Whether selective recomputation keeps every second product and what attention makes, and computes the rest again,
    as torchtitan does; others compute attention's scores again alone."""
    fused_loss: bool = False
    """Whether the loss keeps no copy of the logits in full precision."""
    plain_loss: bool = False
    """Whether the loss is PyTorch's cross_entropy, which makes more of them on its way back than others that are not
    fused."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has of a micro-batch, and how it goes about it."""

    samples: float
    """b."""
    shards: int
    """t."""
    recompute: str
    sequence_divided: bool
    element_bytes: int
    """e."""
    scores_rate: float = 1.0
    """Of attention's products beside the others: they stay at 16 bits where those are made with 8 or 4."""
    mask_bytes: int = 1
    """Of dropout, for each element: on a CPU PyTorch keeps them as numbers of the kind that it multiplies."""
    cast_bytes: int = 0
    """Written for each element that goes into a product, where that is made with fewer bits than it is kept in."""

    @property
    def outer(self) -> int:
        """Among how many what lies between blocks is divided."""
        return self.shards if self.sequence_divided else 1
