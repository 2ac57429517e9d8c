"""BatchNorm over the samples of all ranks, so that P replicas with batch b are one process with batch P·b.

``torch.nn.SyncBatchNorm`` (2.13) takes no CPU tensors and weighs ranks alike; here each counts with its samples, so
uneven last batches are right too. With n_r, m_r, M_r a rank's count, mean and sum of squared deviations (Chan et al.
1979)::

    N = Σ n_r      mean = Σ n_r·m_r / N      variance = (Σ M_r + Σ n_r·(m_r - mean)²) / N

and backward, dy being the gradient of a rank's own mean loss, of which the whole's is Σ n_r/N ·::

    dx = γ/σ · (dy - (T + x̂·U) / (n_r·N))      T = Σ n_r·Σ dy      U = Σ n_r·Σ dy·x̂

Each of them is one small all-reduce.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.types import ReplicaId
from paceline.engine.spmd.communicator import Communicator


class BatchNormGroup:
    """The ranks whose samples are looked at together.

    Args:
        communicator: by which they meet.
        rank: of this process.
        ranks: how many there are.
        summed: whether gradients are added as they are, not weighed by samples: so where batches are accumulated.
    """

    def __init__(self, communicator: Communicator, rank: ReplicaId, ranks: int, *, summed: bool) -> None:
        self._communicator, self._rank, self._ranks, self.summed = communicator, rank, ranks, summed
        self.absent = False
        """Whether this rank only lets the others go on: it has no sample."""

    def table(self, row: Tensor) -> Tensor:
        """All ranks' rows."""
        table = torch.zeros(self._ranks, len(row), dtype=torch.float64)
        if not self.absent:
            table[self._rank] = row
        self._communicator.all_reduce([table.view(-1)], "the samples of a BatchNorm")
        return table


_meeting: BatchNormGroup | None = None


@contextlib.contextmanager
def batchnorm_over(with_whom: BatchNormGroup | None) -> Iterator[None]:
    """While it is entered, :class:`SynchronisedBatchNorm` meets these ranks; with None it is BatchNorm."""
    global _meeting
    before, _meeting = _meeting, with_whom
    try:
        yield
    finally:
        _meeting = before


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm of any dimension; under engine=distributed, in training, over the samples of all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs [samples, channels, ...], but the input has shape {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if _meeting is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        full = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count, mean, variance = _statistics(full.detach(), _meeting)
        self._track(count, mean, variance)
        rstd = (variance + self.eps).rsqrt()
        normal: Tensor = _Normalise.apply(full, mean.to(full), rstd.to(full), count, _meeting)  # type: ignore[no-untyped-call]
        if self.affine:
            normal = normal * _over_channels(self.weight, full) + _over_channels(self.bias, full)
        return normal.to(input.dtype)

    def _track(self, count: float, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None, "what is tracked is counted"
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(1.0, count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean), factor)
        self.running_var.lerp_(unbiased.to(self.running_var), factor)


class _Normalise(torch.autograd.Function):
    """x̂ = (x - mean) / σ, whose gradient knows that mean and σ are of all ranks' x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, count: float, with_whom: BatchNormGroup) -> Tensor:
        normal = (x - _over_channels(mean, x)) * _over_channels(rstd, x)
        ctx.save_for_backward(normal, rstd)
        ctx.count, ctx.with_whom = count, with_whom
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), (normal, rstd) = gradients, ctx.saved_tensors
        dims = [0, *range(2, dy.dim())]
        here = dy.numel() / dy.shape[1]
        weight = 1.0 if ctx.with_whom.summed else here
        sums = torch.cat([dy.sum(dims), (dy * normal).sum(dims)]).double() * weight
        t, u = (ctx.with_whom.table(sums).sum(0) / (weight * ctx.count)).to(dy).chunk(2)
        dx = (dy - _over_channels(t, dy) - normal * _over_channels(u, dy)) * _over_channels(rstd, dy)
        return dx, None, None, None, None


def _statistics(x: Tensor, with_whom: BatchNormGroup) -> tuple[float, Tensor, Tensor]:
    """Count, mean and variance of each channel over all ranks, in float64."""
    dims = [0, *range(2, x.dim())]
    wide = x.double()
    mean = wide.mean(dims)
    squares = (wide - _over_channels(mean, wide)).square().sum(dims)
    count = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64)
    table = with_whom.table(torch.cat([count, mean.cpu(), squares.cpu()]))
    counts, means, sums = torch.split(table, [1, len(mean), len(mean)], 1)
    total = counts.sum()
    together = (counts * means).sum(0) / total
    variance = (sums + counts * (means - together).square()).sum(0) / total
    return float(total), together, variance


def _over_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def synchronised_batchnorm(module: nn.Module) -> nn.Module:
    """The module with each BatchNorm in it made one over the samples of all ranks; it is changed in place.

    Args:
        module: as ``model()`` makes it; parameters, buffers and their names stay.

    Returns:
        The module, or another one where it is itself a BatchNorm.

    >>> model = synchronised_batchnorm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    >>> type(model[1]).__name__, sorted(name for name, _ in model.named_buffers())
    ('SynchronisedBatchNorm', ['1.num_batches_tracked', '1.running_mean', '1.running_var'])
    """
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return _like(module)
    for name, child in module.named_children():
        setattr(module, name, synchronised_batchnorm(child))
    return module


def _like(layer: _BatchNorm) -> SynchronisedBatchNorm:
    made = SynchronisedBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        setattr(made, name, tensor)
    return made.train(layer.training)
