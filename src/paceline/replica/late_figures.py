"""Loss of a Δ, and whether it is finite, as a device computes them: read on the host when the next Δ is complete.

To know them at once, the host has to wait until the device has done all that it was given, which then waits for more::

    at once   host    | give Δ 1 | wait ........ | give Δ 2 | wait ........ |
              device             | Δ 1 .......... |          | Δ 2 ......... |
    late      host    | give Δ 1 | give Δ 2 | wait for the loss of Δ 1 | give Δ 3 |
              device             | Δ 1 .......... | Δ 2 .......... | Δ 3 .........

Until then what is not finite in Δ is taken for 0, so that nothing is computed on an A that is not finite.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.device import Reading, stacked


class LateFigures:
    """Mean loss of a Δ, and whether it and all elements of Δ are finite.

    Args:
        losses: mean loss of each micro-step, or of each micro-batch, on the device, and its samples, above 0; none
            where another worker of the replica has them.
        delta: vectors or tensors of Δ, on the same device; none where a worker has nothing to train.
    """

    def __init__(self, losses: Sequence[tuple[Tensor, int]], delta: Sequence[Tensor]) -> None:
        self._samples = [samples for _, samples in losses]
        numbers = [loss for loss, _ in losses] + ([largest(delta)] if delta else [])
        self.reading = Reading([number.to(numbers[-1].device) for number in numbers]) if numbers else None
        """For who waits in another way than :meth:`read`, before that is called; None: there is nothing to read."""

    def read(self) -> tuple[float, bool]:
        """Return both as they would have been read at once; waits for them. Without losses their mean is 0."""
        numbers = self.reading.numbers() if self.reading is not None else []
        count, total = len(self._samples), 0.0
        for loss, samples in zip(numbers[:count], self._samples, strict=True):
            total += loss * samples
        mean = total / sum(self._samples) if count else 0.0
        return mean, all(map(math.isfinite, (mean, *numbers[count:])))


def zero_nonfinite(vectors: Iterable[Tensor]) -> None:
    """Make 0 of all elements that are not finite, in place."""
    for vector in vectors:
        _real(vector).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of all elements, NaN if one is NaN: unlike a sum it does not overflow."""
    norms = torch._foreach_norm([_real(each) for each in tensors if each.numel()], math.inf)
    return norms[0] if len(norms) == 1 else stacked(norms).amax()


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor as one of real numbers, of the same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
