"""A tensor of the right shape in the place of one that another shard has."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.replica.tensor.layouts import order


@final
class Extent:
    """The shape of a tensor that is not there, from those of the model's inputs.

    Args:
        like: the tensor as it was captured.
        inputs: of the model, as they were captured.
    """

    def __init__(self, like: Tensor, inputs: Sequence[Tensor]) -> None:
        self._sizes: list[Any] = [size if isinstance(size, int) else size.node.expr for size in like.shape]
        wanted = {symbol for size in self._sizes if not isinstance(size, int) for symbol in size.free_symbols}
        found: dict[Any, tuple[int, int]] = {}
        for index, given in enumerate(inputs):
            for dim, size in enumerate(given.shape):
                if not isinstance(size, int) and size.node.expr in wanted:
                    found.setdefault(size.node.expr, (index, dim))
        self.inputs = sorted({index for index, _ in found.values()})
        """Which of them it has to see."""
        self._places = [(symbol, self.inputs.index(index), dim) for symbol, (index, dim) in found.items()]
        self.complete = wanted == found.keys()
        """Whether they say all of it."""
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """The shape, with those inputs."""
        lengths = tuple(inputs[index].shape[dim] for _, index, dim in self._places)
        if lengths not in self._known:
            given = {symbol: length for (symbol, _, _), length in zip(self._places, lengths, strict=True)}
            self._known[lengths] = tuple(s if isinstance(s, int) else int(s.subs(given)) for s in self._sizes)
        return self._known[lengths]


@final
class StandIn(nn.Module):
    """What it holds is anything at all.

    Args:
        extent: its shape.
        like: the tensor as it was captured: its dims lie in memory in the same order.
        differentiable: whether autograd has to go through it, also where nothing before it has a gradient.
    """

    def __init__(self, extent: Extent, like: Tensor, *, differentiable: bool) -> None:
        super().__init__()
        self._extent, self._order, self._dtype = extent, order(like), like.dtype
        self._anchor = torch.zeros((), requires_grad=True) if differentiable else None

    def forward(self, *given: Tensor) -> Tensor:
        """
        Args:
            given: the inputs that its extent has to see, then the tensors of the trunk that the other shard's is
                computed from.
        """
        count = len(self._extent.inputs)
        shape, device = self._extent.of(given[:count]), given[0].device if given else torch.device("cpu")
        made = torch.empty_permuted(shape, self._order, dtype=self._dtype, device=device)
        if self._anchor is None:
            return made
        through: Tensor = _Through.apply(made, self._anchor, *given[count:])  # type: ignore[no-untyped-call]
        return through


class _Through(torch.autograd.Function):
    """Has no gradient, yet leads back to all that it is given."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sources = len(sources)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        return (None,) * (1 + ctx.sources)
