"""BatchNorm whose running statistics are those of a whole mini-batch, though it is normalised by micro-batch.

A plain BatchNorm makes m small steps towards m noisy means and variances, so its running statistics depend on how a
batch is cut. Here each layer makes one step, towards the mean and unbiased variance of all that it has been given, put
together from those of the micro-batches (Chan et al. 1979)::

    N = Σ n_i                   mean = Σ n_i·mean_i / N
    variance = M / (N - 1)      M = Σ (n_i - 1)·variance_i + Σ n_i·(mean_i - mean)²

as in torchgpipe's DeferredBatchNorm (Kim et al. 2020, arXiv 2004.09910), which however takes M / N. In the same way is
put together what several have been given who take turns at a stage.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.replica.pipeline.base import StageReplicaGroup
from paceline.replica.pipeline.split_backward import OpReplacements

_USERS: dict[type[nn.Module], str] = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "forward")


@dataclass
class _Sums:
    """What one layer has been given so far, for each channel."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float
    count: float
    mean: Tensor
    squares: Tensor
    """M: of the deviations from the mean."""

    def add(self, count: float, mean: Tensor, squares: Tensor) -> None:
        total = self.count + count
        away = mean - self.mean
        self.squares += squares + away.square() * (self.count * count / total)
        self.mean += away * (count / total)
        self.count = total

    def first_moments(self) -> Tensor:
        """What can be added up before the mean is known."""
        return torch.cat([self.mean.new_tensor([self.count]), self.mean * self.count])

    def about(self, moments: Tensor) -> Tensor:
        """M of what this has been given, about the mean of all."""
        return self.squares + (self.mean - moments[1:] / moments[0]).square() * self.count

    def take(self, moments: Tensor, squares: Tensor) -> None:
        """Be those of all."""
        self.count, self.mean, self.squares = float(moments[0]), moments[1:] / moments[0], squares

    def commit(self) -> None:
        self.running_mean.lerp_(self.mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_((self.squares / (self.count - 1)).to(self.running_var), self.momentum)


def _put_together(own: Sequence[_Sums], copies: StageReplicaGroup) -> None:
    """Let the sums be those of all copies; one that had nothing to do has none."""
    what = "statistics of other micro-batches"
    length = torch.tensor([sum(1 + len(sums.mean) for sums in own) if copies.first else 0])
    copies.add_up(length, what)
    moments = _padded([sums.first_moments() for sums in own], int(length))
    if not len(moments):
        return
    copies.add_up(moments, what)
    each = torch.split(moments, [1 + len(sums.mean) for sums in own]) if own else ()
    layers = list(zip(own, each, strict=True))
    squares = _padded([sums.about(moment) for sums, moment in layers], int(length))
    copies.add_up(squares, what)
    start = 0
    for sums, moment in layers:
        sums.take(moment, squares[start : start + len(sums.mean)])
        start += len(sums.mean)


def _padded(vectors: Sequence[Tensor], length: int) -> Tensor:
    """One after the other, and zeros."""
    if not vectors:
        return torch.zeros(length, dtype=torch.float64)
    found = torch.cat(list(vectors))
    return torch.cat([found, found.new_zeros(length - len(found))])


class Deferred:
    """The BatchNorms of one part.

    Args:
        counters: their ``num_batches_tracked``, which count mini-batches.
        copies: who take turns at the part; None: nobody else does.
    """

    def __init__(self, counters: Sequence[Tensor], copies: StageReplicaGroup | None = None) -> None:
        self._counters, self._copies = counters, copies
        self._sums: dict[tuple[int, int], _Sums] = {}
        self._times: Counter[int] = Counter()
        self._noting = False
        operators = {torch.ops.aten.batch_norm.default: self._in_graph}
        self.substitutes = OpReplacements(operators, {"batch_norm": self._in_module}, _USERS)

    @contextmanager
    def forward(self, *, again: bool) -> Iterator[None]:
        """While it is entered, a forward pass is made; ``again``: for its activations alone."""
        counted = [counter.clone() for counter in self._counters]
        self._times.clear()
        self._noting = not again
        yield
        self._noting = False
        for counter, before in zip(self._counters, counted, strict=True):
            counter.copy_(before)

    def commit(self) -> None:
        """The mini-batch has ended: move the running statistics; of one who had nothing to do they stay."""
        with torch.no_grad():
            if self._copies is not None:
                _put_together(list(self._sums.values()), self._copies)
            if not self._sums:
                return
            for sums in self._sums.values():
                sums.commit()
            for counter in self._counters:
                counter.add_(1)
        self._sums.clear()

    def _in_module(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is None or running_var is None or not training:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
        # With momentum 1 what is left in them is this micro-batch's alone.
        made = functional.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
        if self._noting:
            count = input.numel() / input.shape[1]
            sums = self._sums_of(running_mean, running_var, momentum)
            sums.add(count, mean.double(), variance.double() * (count - 1))
        return made

    def _in_graph(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,  # noqa: ARG002  # part of the operator's schema
    ) -> Tensor:
        return self._in_module(input, running_mean, running_var, weight, bias, training, momentum, eps)

    def _sums_of(self, running_mean: Tensor, running_var: Tensor, momentum: float) -> _Sums:
        """Those of the layer that has these buffers; a layer that is used twice makes two steps, as it always does."""
        where = running_mean.data_ptr()
        self._times[where] += 1
        zeros = torch.zeros_like(running_mean, dtype=torch.float64)
        fresh = _Sums(running_mean, running_var, momentum, 0.0, zeros, zeros.clone())
        return self._sums.setdefault((where, self._times[where]), fresh)
