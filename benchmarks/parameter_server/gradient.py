"""What every baseline of the CNN computes in a step, and no more."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from paceline.core.data_order import DataOrder


class Gradient:
    """One worker's gradients: draw a batch, clear the last gradient, forward, backward.

    Args:
        model: its parameters' ``grad`` is what a call leaves behind.
        loss: (output, target) -> scalar.
        data: inputs and targets of the training set.
        draws: indices of the next batch's samples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        data: tuple[Tensor, Tensor],
        draws: Iterator[Tensor],
    ) -> None:
        self._model, self._loss, self._draws = model, loss, draws
        self._inputs, self._targets = data
        self.parameters = list(model.parameters())

    def __call__(self) -> None:
        indices = next(self._draws)
        for parameter in self.parameters:
            parameter.grad = None
        self._loss(self._model(self._inputs[indices]), self._targets[indices]).backward()


def ordered(order: DataOrder, worker: int) -> Iterator[Tensor]:
    """The very batches that Paceline gives this worker."""
    return (torch.from_numpy(order.batch(worker, k)) for k in itertools.count())


def shuffled(samples: int, batch_size: int, worker: int) -> Iterator[Tensor]:
    """Batches of a permutation of all samples, and of a new one when it is used up: the leanest draw there is."""
    generator = torch.Generator().manual_seed(worker)
    while True:
        yield from torch.randperm(samples, generator=generator).split(batch_size)
