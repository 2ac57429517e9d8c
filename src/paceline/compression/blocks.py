"""``blocks``: some blocks of a gradient each step, drawn by how much each has moved A last; the others wait.

STRADS's uneven convergence (Lee et al. 2014, arXiv 1406.4580) for networks, as an experiment: a block of parameters
that hardly moves is sent rarely::

    moved last       0.9   0.0   0.2   0.0        drawn in proportion to that, + eta · (mean of those that moved)
    sent              x           x               these two, as a dense all-reduce of half the elements
    residual               g           g          added to the next gradient

All ranks draw the same blocks, from the sums that all have: so the payload does not grow with the number of ranks, as
that of ``top-k`` does, and no indices travel. To a server of A each replica sends blocks of its own, with numbers.
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
    all_reduce,
    joined,
    split,
)
from paceline.core.errors import PacelineError, check_int, check_number
from paceline.core.registry import register

# Keeps these draws apart from all others.
_TAG = int.from_bytes(b"blocks")


@dataclass
class BlockState:
    """State that is kept from step to step."""

    residual: Tensor
    """Elements not sent yet; as long as the gradient."""
    moved: Tensor
    """(blocks,), float64: norm of what was sent of each last; infinite before the first time."""
    step: Tensor
    """Number of draws, int64."""


@final
@register("blocks")
@dataclass(frozen=True)
class Blocks(Compression[BlockState]):
    """An all-reduce of some blocks.

    Args:
        ratio: part of the blocks that is sent in a step, above 0 and up to 1.
        size: elements of a block.
        eta: share of blocks that did not move; at 0 a block that once stood still would never be sent again.
    """

    ratio: float = 0.25
    size: int = 256
    eta: float = 0.01

    def __post_init__(self) -> None:
        check_number("blocks:ratio", self.ratio, "above 0 and up to 1", lambda v: 0 < v <= 1, instead=0.25)
        check_int("blocks:size", self.size, least=1)
        check_number("blocks:eta", self.eta, "above 0", lambda v: v > 0, instead=0.01)

    def start(self, shapes: Sequence[Shape], dtype: DType, device: Device = "cpu") -> BlockState:
        import torch

        elements = sum(map(math.prod, shapes))
        moved = torch.full((self.count(elements),), math.inf, dtype=torch.float64)
        return BlockState(torch.zeros(elements, dtype=dtype, device=device), moved, torch.zeros((), dtype=torch.int64))

    def all_reduce(self, state: BlockState, gradient: Tensor, group: Group) -> int:
        import torch

        chosen, values, spoiled = self._drawn(state, gradient)
        message = torch.cat([values.view(-1), spoiled])
        sent_bytes = all_reduce(message, group)
        self._advance(state, gradient, chosen, message[:-1].view_as(values), message[-1:])
        return sent_bytes

    def message_bytes(self, shapes: Sequence[Shape], dtype: DType) -> int:
        return self.sent(sum(map(math.prod, shapes))) * (8 + self.size * dtype.itemsize)

    def encode(self, state: BlockState, gradient: Tensor) -> Tensor:
        chosen, values, spoiled = self._drawn(state, gradient)
        values += spoiled  # 0, or no number
        self._advance(state, gradient, chosen, values, spoiled)
        return joined(chosen, values)

    def decode(self, shapes: Sequence[Shape], message: Tensor, out: Tensor) -> None:
        import torch

        del shapes
        k = self.sent(len(out))
        chosen, values = split(message, (k, torch.int64), (k * self.size, out.dtype))
        if bool((chosen < 0).any()) or bool((chosen >= self.count(len(out))).any()):
            raise PacelineError(f"a message of blocks has blocks beyond the {self.count(len(out))} there are")
        self._write(out, chosen, values.view(k, self.size))

    def kept(self, state: BlockState) -> Kept:
        return state.residual, {"moved": state.moved, "step": state.step}

    def count(self, elements: int) -> int:
        """Return the number of blocks of so many elements; the last one may be smaller."""
        return -(-elements // self.size)

    def sent(self, elements: int) -> int:
        """Return how many blocks are sent in a step: at least one, if there is one.

        >>> Blocks(ratio=0.25, size=100).sent(1060)
        3
        """
        count = self.count(elements)
        return min(count, max(1, round(self.ratio * count)))

    def _drawn(self, state: BlockState, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the residual; return the blocks to send, their values, and 0, or no number if any element is none."""
        import torch

        gradient.add_(state.residual)
        padded = torch.nn.functional.pad(gradient, (0, self.count(len(gradient)) * self.size - len(gradient)))
        chosen = self._draw(state, self.sent(len(gradient))).to(gradient.device)
        return chosen, padded.view(self.count(len(gradient)), self.size)[chosen], (gradient * 0).sum()[None]

    def _draw(self, state: BlockState, count: int) -> Tensor:
        import torch

        moved = state.moved.numpy()
        new = np.isinf(moved)
        known = np.where(new, 0.0, moved)
        above = known[known > 0]
        share = known + self.eta * (above.mean() if len(above) else 1.0)
        share[new] = 1e30 * share.max(initial=1.0)  # so much that no other is drawn before
        # The smallest of exponential times of these rates are so distributed (Efraimidis, Spirakis 2006).
        times = np.random.default_rng([_TAG, int(state.step)]).exponential(size=len(share)) / share
        return torch.from_numpy(np.sort(np.argsort(times, kind="stable")[:count]))

    def _advance(self, state: BlockState, gradient: Tensor, chosen: Tensor, values: Tensor, spoiled: Tensor) -> None:
        """Keep what was not sent, and make ``gradient`` what was, unless that is no number."""
        import torch

        if not bool(torch.isfinite(spoiled).all()):
            gradient.fill_(math.nan)
            return
        state.residual.copy_(gradient)
        self._write(state.residual, chosen, torch.zeros_like(values), clears=False)
        self._write(gradient, chosen, values)
        state.moved[chosen.cpu()] = values.double().norm(dim=1).cpu()
        state.step += 1

    def _write(self, vector: Tensor, chosen: Tensor, values: Tensor, *, clears: bool = True) -> None:
        """Write blocks to a vector, whose other elements become 0 if it ``clears``."""
        import torch

        whole = torch.zeros(self.count(len(vector)) * self.size, dtype=vector.dtype, device=vector.device)
        if not clears:
            whole[: len(vector)] = vector
        whole.view(self.count(len(vector)), self.size)[chosen] = values
        vector.copy_(whole[: len(vector)])
