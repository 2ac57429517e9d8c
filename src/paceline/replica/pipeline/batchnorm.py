"""BatchNorm whose running statistics are those of a whole mini-batch, though it is normalised by micro-batch.

A plain BatchNorm makes m small steps towards m noisy means and variances, so its running statistics depend on how a
batch is cut. Here each layer makes one step, towards the mean and unbiased variance of all samples, combined from those
of the micro-batches (Chan et al. 1979)::

    N = Σ n_i                   mean = Σ n_i·mean_i / N
    variance = M / (N - 1)      M = Σ (n_i - 1)·variance_i + Σ n_i·(mean_i - mean)²

as in torchgpipe's DeferredBatchNorm (Kim et al. 2020, arXiv 2004.09910), which however takes M / N. The statistics of
the replicas of a stage are combined in the same way.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.replica.pipeline.p2p_queue import StageReplicaGroup
from paceline.replica.pipeline.split_backward import OpReplacements


@dataclass
class _Moments:
    """The moments of one layer's inputs so far, for each channel.

    Args:
        squares: M: the sum of squared deviations from the mean.
    """

    running_mean: Tensor
    running_var: Tensor
    momentum: float
    count: float
    mean: Tensor
    squares: Tensor

    def add(self, count: float, mean: Tensor, squares: Tensor) -> None:
        total = self.count + count
        shift = mean - self.mean
        self.squares += squares + shift.square() * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total


def _all_reduce(layers: Sequence[_Moments], replicas: StageReplicaGroup) -> None:
    """Replace the moments by those of all replicas; a replica without a micro-batch has none and adds zeros."""
    description = "statistics of other micro-batches"
    widths = [1 + len(moments.mean) for moments in layers]
    length = torch.tensor([sum(widths) if replicas.first else 0])
    replicas.all_reduce(length, description)
    if not length:
        return

    def summed(vectors: Sequence[Tensor]) -> Tensor:
        own = torch.cat([*vectors]) if vectors else torch.zeros(0, dtype=torch.float64)
        # All replicas have to bring vectors of one length.
        padded = torch.cat([own, own.new_zeros(int(length) - len(own))])
        replicas.all_reduce(padded, description)
        return padded

    # First counts and sums: M about the common mean needs it.
    sums = summed([torch.cat([m.mean.new_tensor([m.count]), m.mean * m.count]) for m in layers])
    of_layers = torch.split(sums[: sum(widths)], widths)
    means = [total[1:] / total[0] for total in of_layers]
    squares = summed([m.squares + (m.mean - mean).square() * m.count for m, mean in zip(layers, means, strict=True)])
    start = 0
    for moments, total, mean in zip(layers, of_layers, means, strict=True):
        moments.count, moments.mean = float(total[0]), mean
        moments.squares = squares[start : start + len(mean)]
        start += len(mean)


class DeferredBatchNorms:
    """The BatchNorms of one part, whose running statistics move once a mini-batch.

    Args:
        counters: their ``num_batches_tracked``, which count mini-batches.
        replicas: of the stage; None: it is the only one.
    """

    def __init__(self, counters: Sequence[Tensor], replicas: StageReplicaGroup | None = None) -> None:
        self._counters, self._replicas = counters, replicas
        self._moments: dict[tuple[int, int], _Moments] = {}
        self._uses: Counter[int] = Counter()
        self._noting = False
        operators = {torch.ops.aten.batch_norm.default: self._in_graph}
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        self.replacements = OpReplacements(operators, {"batch_norm": self._in_module}, dict.fromkeys(kinds, "forward"))

    @contextmanager
    def forward(self, *, again: bool) -> Iterator[None]:
        """Context manager of a forward pass; ``again``: it is run for its activations alone."""
        # Each forward pass counts itself; a mini-batch is to count once, at its commit.
        counted = [counter.clone() for counter in self._counters]
        self._uses.clear()
        self._noting = not again
        yield
        self._noting = False
        for counter, before in zip(self._counters, counted, strict=True):
            counter.copy_(before)

    def commit(self) -> None:
        """Move the running statistics at the end of a mini-batch; a replica that had no micro-batch leaves its own."""
        with torch.no_grad():
            if self._replicas is not None:
                _all_reduce(list(self._moments.values()), self._replicas)
            if not self._moments:
                return
            for m in self._moments.values():
                m.running_mean.lerp_(m.mean.to(m.running_mean), m.momentum)
                m.running_var.lerp_((m.squares / (m.count - 1)).to(m.running_var), m.momentum)
            for counter in self._counters:
                counter.add_(1)
        self._moments.clear()

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
        output = functional.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
        if self._noting:
            count = input.numel() / input.shape[1]
            # A layer that is used twice makes two steps, as a plain BatchNorm does.
            address = running_mean.data_ptr()
            self._uses[address] += 1
            zeros = torch.zeros_like(running_mean, dtype=torch.float64)
            fresh = _Moments(running_mean, running_var, momentum, 0.0, zeros, zeros.clone())
            moments = self._moments.setdefault((address, self._uses[address]), fresh)
            # In float64: m rounded sums would differ from that of the whole mini-batch.
            moments.add(count, mean.double(), variance.double() * (count - 1))
        return output

    def _in_graph(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> Tensor:
        running_mean, running_var, *options, _ = others  # the last one is cudnn_enabled
        return self._in_module(input, running_mean, running_var, weight, bias, *options)
