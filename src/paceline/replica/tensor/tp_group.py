"""Collectives of the shards of a replica: the contract that engines fulfil, and the sum of partial gradients."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.types import Clock
from paceline.replica.flat_state import FlatLayout


class TPCollectives(ABC):
    """The tensor-parallel group of one replica and stage, as one of its shards sees it.

    All shards call the same methods in the same order. An argument stays as it is; a result is the caller's own.

    Args:
        rank: rank of this shard.
        count: k, number of shards.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.step: Clock = 0
        """Step that is under way, for error messages and spans; 0: training has not begun."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, description: str, *, largest: bool = False) -> Tensor:
        """Return the sum over all shards, or the maximum, element by element.

        Args:
            tensor: of the same shape on all shards.
            description: what the tensor is, in words that follow "waited for".
            largest: compute the maximum.
        """

    @abstractmethod
    def all_gather(self, part: Tensor, shapes: Sequence[Sequence[int]], description: str) -> list[Tensor]:
        """Return each shard's part; ``shapes`` are the shapes of the parts, by shard."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], description: str) -> Tensor:
        """Return the sum over all shards of the part for this one; ``parts`` has one part for each shard."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, owner: int, description: str) -> Tensor:
        """Return the owner's tensor; the other shards pass a tensor of that shape, whose elements are not read."""

    @abstractmethod
    def reduce(self, tensor: Tensor, owner: int, description: str) -> Tensor:
        """Return the sum over all shards on the owner, and a tensor of no meaning on the others."""

    def reached(self, description: str) -> None:
        """Wait until this shard's device has done what it was given; on the CPU it has.

        So a shard that never comes to a collective is noticed before a number is read that depends on it.
        """
        del description


class CollectiveModule(nn.Module):
    """Module of a shard's graph that communicates; it has no parameters.

    Autograd does not know collectives: a module that calls :meth:`differentiable` has a ``value(ctx, *tensors)`` and
    ``gradients(ctx, gradient)``, where ``ctx`` is the context of an :class:`torch.autograd.Function`.

    Args:
        shards: the group.
        name: name of the tensor or operator, for messages of ranks that wait.
    """

    def __init__(self, shards: TPCollectives, name: str) -> None:
        super().__init__()
        self.shards, self.name = shards, name

    def differentiable(self, *tensors: Tensor) -> Any:
        """Return the module's value for these tensors, whose gradients it computes."""
        return _CollectiveFunction.apply(self, *tensors)  # type: ignore[no-untyped-call]


class _CollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Any, *tensors: Tensor) -> Any:
        ctx.module = module
        return module.value(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.module.gradients(ctx, gradients[0])


class PartialGrads:
    """Sum of the gradients of replicated parameters that each shard uses for its part of the work.

    Args:
        shards: the group; each shard has a term of each gradient.
        layout: layout of this shard's tensors.
        names: names of the parameters.
    """

    def __init__(self, shards: TPCollectives, layout: FlatLayout, names: Collection[str]) -> None:
        self._shards = shards
        self._indices = [index for index, name in enumerate(layout.parameter_names) if name in names]

    def all_reduce_(self, gradients: list[Tensor]) -> None:
        """Replace those gradients by their sums, in one all-reduce; all shards call it together.

        Args:
            gradients: gradients of all parameters, in the layout's order.
        """
        if not self._indices:
            return
        # One message for all of them: most are vectors of biases and norms, for which latency would count.
        terms = [gradients[index] for index in self._indices]
        total = self._shards.all_reduce(torch.cat([term.reshape(-1) for term in terms]), "gradients that all share")
        sums = torch.split(total, [term.numel() for term in terms])
        for index, vector in zip(self._indices, sums, strict=True):
            gradients[index] = vector.view_as(gradients[index])
