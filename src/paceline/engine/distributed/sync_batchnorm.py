"""BatchNorm over the samples of all ranks, so that P replicas with batch b are one process with batch P·b.

``torch.nn.SyncBatchNorm`` (2.13) takes no CPU tensors and weights ranks alike; here each counts with its samples, so
uneven last batches are right too. With n_r, m_r, M_r a rank's count, mean and sum of squared deviations (Chan et al.
1979)::

    N = Σ n_r      mean = Σ n_r·m_r / N      variance = (Σ M_r + Σ n_r·(m_r - mean)²) / N

and backward, where dy is the gradient of a rank's own mean loss, and the mean of all is Σ n_r/N of these::

    dx = γ/σ · (dy - (T + x̂·U) / (n_r·N))      T = Σ n_r·Σ dy      U = Σ n_r·Σ dy·x̂

Each direction is one small all-reduce.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.types import ReplicaId
from paceline.engine.spmd.communicator import Communicator


@dataclass
class BatchNormGroup:
    """The ranks whose samples BatchNorm layers normalise together.

    Args:
        summed: whether gradients are summed unweighted instead of by samples: so where batches are accumulated.
        absent: whether this rank makes a shadow pass: it has no sample.
    """

    communicator: Communicator
    rank: ReplicaId
    summed: bool
    absent: bool = False

    def gather(self, row: Tensor) -> Tensor:
        """Return all ranks' rows, as the sum of tables that each have one row."""
        table = torch.zeros(self.communicator.ranks, len(row), dtype=torch.float64)
        if not self.absent:
            table[self.rank] = row
        self.communicator.all_reduce([table.view(-1)], "the samples of a BatchNorm")
        return table


_group: BatchNormGroup | None = None


@contextlib.contextmanager
def batchnorm_over(group: BatchNormGroup | None) -> Iterator[None]:
    """Context manager: :class:`SynchronisedBatchNorm` communicates with these ranks; with None it is BatchNorm."""
    global _group
    before, _group = _group, group
    try:
        yield
    finally:
        _group = before


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm of any dimension; under engine=distributed, in training, over the samples of all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs [samples, channels, ...], but the input has shape {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if _group is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        full = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count, mean, variance = _statistics(full.detach(), _group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None, "what is tracked is counted"
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / max(1.0, count - 1))
            self.running_mean.lerp_(mean.to(self.running_mean), factor)
            self.running_var.lerp_(unbiased.to(self.running_var), factor)
        rstd = (variance + self.eps).rsqrt()
        normal: Tensor = _Normalise.apply(full, mean.to(full), rstd.to(full), count, _group)  # type: ignore[no-untyped-call]
        if self.affine:
            normal = normal * _over_channels(self.weight, full) + _over_channels(self.bias, full)
        return normal.to(input.dtype)


class _Normalise(torch.autograd.Function):
    """x̂ = (x - mean) / σ; its gradient takes into account that mean and σ depend on all ranks' x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, count: float, group: BatchNormGroup) -> Tensor:
        normal = (x - _over_channels(mean, x)) * _over_channels(rstd, x)
        ctx.save_for_backward(normal, rstd)
        ctx.count, ctx.group = count, group
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), (normal, rstd) = gradients, ctx.saved_tensors
        dims = [0, *range(2, dy.dim())]
        weight = 1.0 if ctx.group.summed else dy.numel() / dy.shape[1]  # n_r of the module's formula
        sums = torch.cat([dy.sum(dims), (dy * normal).sum(dims)]).double() * weight
        t, u = (ctx.group.gather(sums).sum(0) / (weight * ctx.count)).to(dy).chunk(2)
        dx = (dy - _over_channels(t, dy) - normal * _over_channels(u, dy)) * _over_channels(rstd, dy)
        return dx, None, None, None, None


def _statistics(x: Tensor, group: BatchNormGroup) -> tuple[float, Tensor, Tensor]:
    """Return count, mean and variance of each channel over all ranks, computed in float64."""
    dims = [0, *range(2, x.dim())]
    wide = x.double()
    mean = wide.mean(dims)
    squares = (wide - _over_channels(mean, wide)).square().sum(dims)
    count = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64)
    table = group.gather(torch.cat([count, mean.cpu(), squares.cpu()]))
    counts, means, sums = torch.split(table, [1, len(mean), len(mean)], 1)
    total = counts.sum()
    # Chan et al. 1979: the sums of squared deviations of parts, each moved to the common mean.
    combined = (counts * means).sum(0) / total
    variance = (sums + counts * (means - combined).square()).sum(0) / total
    return float(total), combined, variance


def _over_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def synchronised_batchnorm(module: nn.Module) -> nn.Module:
    """Replace each BatchNorm of a module by one over the samples of all ranks, in place.

    Args:
        module: as ``model()`` returns it; parameters, buffers and their names stay.

    Returns:
        The module, or its replacement where it is itself a BatchNorm.

    >>> model = synchronised_batchnorm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    >>> type(model[1]).__name__, sorted(name for name, _ in model.named_buffers())
    ('SynchronisedBatchNorm', ['1.num_batches_tracked', '1.running_mean', '1.running_var'])
    """
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        options = module.eps, module.momentum, module.affine, module.track_running_stats
        layer = SynchronisedBatchNorm(module.num_features, *options)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            setattr(layer, name, tensor)
        return layer.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, synchronised_batchnorm(child))
    return module
