"""``top-k``: each rank's k largest elements, by magnitude; the others wait (Stich et al. 2018, arXiv 1809.07599).

::

    gradient + residual     3   -1    0   -7    2        k = 2
    sent                    3              -7            as indices and values, to every rank
    residual                    -1    0         2        added to the next gradient

Each rank chooses its own elements from the whole gradient, all parameters together. Sums are taken in ascending rank
order, element by element, so all ranks have the same bits, whatever their processors. Every rank receives what P−1
others have sent: the payload grows with P, unlike that of an all-reduce, and is smaller than dense up to a ratio of
about 2/P · b/(b + 4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from paceline.compression.base import (
    Compression,
    Device,
    DType,
    Group,
    Kept,
    Shape,
    Tensor,
    gather_bytes,
    joined,
    split,
)
from paceline.core.errors import PacelineError, check_number
from paceline.core.registry import register


@dataclass
class SparseState:
    """State that is kept from step to step."""

    residual: Tensor
    """Elements not sent yet; as long as the gradient."""


@final
@register("top-k")
@dataclass(frozen=True)
class TopK(Compression[SparseState]):
    """Two all-gathers, of indices and of values; each rank sums them by itself.

    Args:
        ratio: k/n, the part of the elements that is sent, above 0 and up to 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_number("top-k:ratio", self.ratio, "above 0 and up to 1", lambda v: 0 < v <= 1, instead=0.01)

    def start(self, shapes: Sequence[Shape], dtype: DType, device: Device = "cpu") -> SparseState:
        import torch

        return SparseState(torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device))

    def all_reduce(self, state: SparseState, gradient: Tensor, group: Group) -> int:
        import torch
        import torch.distributed as dist

        indices, values = self._largest(state, gradient)
        all_indices, all_values = ([torch.empty_like(t) for _ in range(group.size())] for t in (indices, values))
        dist.all_gather(all_indices, indices, group=group)
        dist.all_gather(all_values, values, group=group)
        # An element that is not finite is among the largest, so all ranks see it here.
        if all(bool(torch.isfinite(rank_values).all()) for rank_values in all_values):
            state.residual.copy_(gradient)[indices] = 0
        gradient.zero_()
        for rank_indices, rank_values in zip(all_indices, all_values, strict=True):  # in ascending rank order
            gradient.index_add_(0, rank_indices, rank_values)
        return gather_bytes(indices, group.size()) + gather_bytes(values, group.size())

    def _largest(self, state: SparseState, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Add the residual, and return the indices and values of the k largest elements."""
        import torch

        gradient.add_(state.residual)
        magnitudes, k = gradient.abs(), self.sent(len(gradient))
        # What is no number counts as larger than all.
        if magnitudes.device.type == "cpu":  # torch.topk of 2.13 takes four times as long for 1 % of 6 million
            indices = torch.from_numpy(np.argpartition(magnitudes.numpy(), -k)[-k:])
        else:
            indices = torch.topk(magnitudes, k, sorted=False).indices
        indices = indices.to(index_type(len(gradient)))
        return indices, gradient[indices]

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        elements = sum(map(math.prod, shapes))
        return self.sent(elements) * (index_type(elements).itemsize + dtype.itemsize)

    def encode(self, state: SparseState, gradient: Tensor) -> Tensor:
        import torch

        indices, values = self._largest(state, gradient)
        if bool(torch.isfinite(values).all()):
            state.residual.copy_(gradient)[indices] = 0
        gradient.zero_()[indices] = values
        return joined(indices, values)

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        del shapes
        k = self.sent(len(out))
        indices, values = split(message, (k, index_type(len(out))), (k, out.dtype))
        if bool((indices < 0).any()) or bool((indices >= len(out)).any()):
            raise PacelineError(f"a message of top-k has indices beyond its {len(out)} elements")
        out.zero_()[indices] = values

    def kept(self, state: SparseState) -> Kept:
        return state.residual, {}

    def sent(self, elements: int) -> int:
        """Return k, how many of n elements are sent: at least one.

        >>> TopK(ratio=0.01).sent(1060)
        11
        """
        return min(elements, max(1, round(self.ratio * elements)))


def index_type(elements: int) -> DType:
    """Return the type of an index of so many elements."""
    import torch

    return torch.int32 if elements < 2**31 else torch.int64
