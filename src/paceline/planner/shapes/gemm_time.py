"""How well a device is used, and the seconds of a matrix product on it: b times (m, k) by (k, n).

::

    t = t_0 + (F + q · (W - F)) / P∞         F = 2 · b · m · n · k
                                             W = F with tiles of 128 × 128 results rounded up to whole waves

A device computes as many tiles at once as it has multiprocessors: a wave. With 4 multiprocessors, 6 tiles::

    multiprocessor 0   |tile 0|tile 4|
    multiprocessor 1   |tile 1|tile 5|         2 waves: F is 6 tiles, W is 8
    multiprocessor 2   |tile 2|  ..  |
    multiprocessor 3   |tile 3|  ..  |

With q = 1 a device would wait for the last wave; libraries choose tiles by the shape and split the last wave, so it is
less. Three constants: P∞, t_0 and q. Sources: waves and tiles are NVIDIA's "Matrix Multiplication Background User's
Guide"; the form with a share q is ours.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, final

from paceline.core.errors import InputError
from paceline.core.types import Seconds


@dataclass(frozen=True, slots=True)
class DeviceEfficiency:
    """Measured efficiency of a device relative to its data sheet, and how a model's kernels run there.

    The first three are of 72 products on an H100; bytes, host and call are near what 181 runs of Megatron-DeepSpeed on
    A100 teach (benchmarks/planner: messages.md, calibration.md).
    """

    products: float = 0.8
    """P∞ as a part of the data sheet's operations."""
    product_start_s: Seconds = 5.8e-6
    waits: float = 0.19
    """q of the last wave of a product."""
    bytes: float = 0.8
    """The share of memory's bandwidth that operators between products reach."""
    host_s: Seconds = 2.5e-5
    """Seconds of the host to start a kernel."""
    call_s: Seconds = 2e-4
    """Seconds that hosts wait for each other at a collective of 8 shards; grows with the third power of shards."""
    fused_scores: bool = True
    """Whether attention never writes its scores: flash attention (2205.14135)."""
    scores: float = 0.6
    """Rate of its products relative to the others then: its backward makes five for two of forward, a causal mask saves
    half of them."""
    unaligned: float = 1 / 16
    """Rate of attention's products where a head's size is no multiple of 8: an A100 without its tensor cores, 19.5 of
    312 Tflop/s. Of 1, 1/5, 1/10 and 1/16 it fits BigScience's runs with heads of 108 and 180 best."""
    every_second: bool = False
    """Whether selective recomputation keeps every second product and attention's output, and computes the rest again,
    as torchtitan does; others compute attention's scores again alone."""
    fused_loss: bool = False
    """Whether the loss keeps no copy of the logits in full precision."""
    plain_loss: bool = False
    """Whether the loss is PyTorch's cross_entropy, whose backward makes more such copies than other unfused losses."""


# Rows and columns of results in a tile: of the shapes that libraries use the one that fits 72 products of an H100 best
# (128 × 256, 64 × 128 and 64 × 64 are 0.3 to 1.4 percentage points worse).
TILE = 128


class Product(NamedTuple):
    """A batch of b products of (m, k) by (k, n)."""

    b: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """F: one multiplication and one addition for each term.

        >>> Product(1, 2, 3, 4).flops
        48.0
        """
        return 2.0 * self.b * self.m * self.n * self.k

    def rounded_flops(self, multiprocessors: int) -> float:
        """Return W: the operations of whole waves of whole tiles; in a wave each multiprocessor computes one tile.

        >>> [Product(2, 128, n, 64).rounded_flops(3) / Product(3, 128, 128, 64).flops for n in (256, 384, 1)]
        [2.0, 2.0, 1.0]
        """
        waves = ceil(self.b * ceil(self.m / TILE) * ceil(self.n / TILE) / multiprocessors)
        return 2.0 * waves * multiprocessors * TILE * TILE * self.k


@final
@dataclass(frozen=True, slots=True)
class Products:
    """The speed of matrix products on one kind of device.

    Args:
        flops_per_s: P∞, of a product without end.
        start_s: t_0, of any, however small.
        waits: q, 0 to 1: the share of the last wave's idle tiles that is waited for.
        multiprocessors: number of them, each computes a tile at a time.

    Raises:
        InputError: a number that is out of its range.

    >>> f"{Products(7.7e14, 5.8e-6, 0.19, 132).seconds(Product(1, 4096, 4096, 4096)) * 1e6:.1f} µs"
    '185.4 µs'
    """

    flops_per_s: float
    start_s: Seconds = 0.0
    waits: float = 0.0
    multiprocessors: int = 1

    def __post_init__(self) -> None:
        if self.flops_per_s <= 0 or self.start_s < 0 or not 0 <= self.waits <= 1 or self.multiprocessors < 1:
            raise InputError(
                f"{self} is no device: flops_per_s must be above 0, start_s at least 0, waits from 0 to 1, and "
                "multiprocessors at least 1; write Products(7.7e14, 5.8e-6, 0.19, 132), say."
            )

    def seconds(self, product: Product) -> Seconds:
        """Compute t of the equation above."""
        flops = product.flops
        idle_flops = product.rounded_flops(self.multiprocessors) - flops
        return self.start_s + (flops + self.waits * idle_flops) / self.flops_per_s
