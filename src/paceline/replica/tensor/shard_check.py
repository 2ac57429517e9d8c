"""Check that the shards together compute what the model does: each shard compares all of it, tensor by tensor."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.comm.shared_memory import SpillAllocator
from paceline.program import Tree
from paceline.replica.capture.difference import reordered_ulps
from paceline.replica.capture.verify import check
from paceline.replica.module_utils import tensors_of
from paceline.replica.tensor.placements import PARTIAL_GRAD, OnRank, Placement, Shard
from paceline.replica.tensor.redistribute import gather_parts
from paceline.replica.tensor.rewrite import ShardGraph
from paceline.replica.tensor.tp_group import TPCollectives


class InputForm(Protocol):
    """The leaves of a model's inputs and outputs, as ``capture.Captured`` knows them."""

    def flatten(self, inputs: Tree) -> Sequence[Any]:
        """Return the leaves of an input."""

    def rebuild(self, leaves: Sequence[Any]) -> Tree:
        """Return the output with these leaves."""


def check_shard(
    shard: ShardGraph,
    captured: InputForm,
    module: nn.Module,
    inputs: Tree,
    shards: TPCollectives,
    *,
    samples: Sequence[int] = (2, 3),
    of_inputs: Collection[int] = (),
    training: bool = True,
) -> None:
    """Compare outputs, gradients and buffers with the model's; all shards call it together, with the same result.

    Args:
        shard: shard of ``captured``.
        captured: form of the module's inputs and outputs.
        module: the model.
        inputs: a batch, as the model is called with it.
        shards: the group.
        samples: sizes of the batches to compare; empty: the batch as it is.
        of_inputs: leaves of the input whose gradients are compared; they are whole on every shard.
        training: mode of the model in which it was captured.

    Raises:
        InputError: names the first tensor that differs.
    """
    together = _ShardsTogether(shard, captured, module, shards)
    check(
        module, together.run, together.named, inputs, description=f"division into {shards.count} shards",
        samples=samples, ulps=reordered_ulps(module), of_inputs=of_inputs, training=training,
    )  # fmt: skip


class _ShardsTogether:
    """The shards as one model, whose tensors are whole: each shard takes its part of them."""

    def __init__(self, shard: ShardGraph, captured: InputForm, module: nn.Module, shards: TPCollectives) -> None:
        self._shard, self._captured, self._shards = shard, captured, shards
        self._tensors = tensors_of(module)
        self._parameters = {
            name: tensor.detach().requires_grad_(tensor.requires_grad)
            for name, tensor in self._tensors.items()
            if isinstance(tensor, nn.Parameter)
        }
        self._buffers_after: dict[str, Tensor] = {}

    def named(self) -> Mapping[str, Tensor]:
        return self._parameters | self._buffers_after

    def run(self, inputs: Tree) -> Tree:
        names, own = list(self._parameters), tensors_of(self._shard.module)
        placements: list[Placement | None] = [self._shard.parameters.get(name) for name in names]
        parts = _TakeParts.apply(self._shards, placements, *self._parameters.values())  # type: ignore[no-untyped-call]
        parameters = {name: part for name, part in zip(names, parts, strict=True) if name in own}
        buffers = dict[str, Tensor]()
        for name in own:
            if name in self._parameters or name not in self._tensors:
                continue
            placement, tensor = self._shard.parameters.get(name), self._tensors[name]
            part = placement.take(tensor, self._shards.rank) if isinstance(placement, Shard) else tensor
            buffers[name] = part.detach().clone()
        leaves = functional_call(self._shard.module, parameters | buffers, tuple(self._captured.flatten(inputs)))
        # All shards must communicate in the same order, so they gather in the model's order; a buffer on another rank
        # is received without being in this shard's graph.
        self._buffers_after = {}
        for name, tensor in self._tensors.items():
            placement = self._shard.parameters.get(name)
            if name in self._parameters or not (name in buffers or isinstance(placement, OnRank)):
                continue
            buffer = buffers.get(name, tensor)
            if isinstance(placement, OnRank):
                buffer = self._shards.broadcast(buffer, placement.shard, name)
            elif isinstance(placement, Shard):
                buffer = gather_parts(buffer, placement, self._shards, name)
            self._buffers_after[name] = buffer
        return self._captured.rebuild(leaves)


class _TakeParts(torch.autograd.Function):
    """Whole parameters -> those of one shard; in backward the whole gradients, of all shards, on each of them."""

    @staticmethod
    def forward(
        ctx: Any, shards: TPCollectives, placements: list[Placement | None], *whole: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shards, ctx.placements = shards, placements
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in whole]
        ctx.set_materialize_grads(False)  # None says that a parameter was not used
        pairs = zip(placements, whole, strict=True)
        return tuple((p.take(tensor, shards.rank) if isinstance(p, Shard) else tensor).clone() for p, tensor in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        shards, whole, spill = ctx.shards, list[Tensor | None](), SpillAllocator()
        for placement, (shape, dtype, device), gradient in zip(ctx.placements, ctx.forms, gradients, strict=True):
            # A shard without a gradient takes part with zeros: all shards make the same collectives.
            sharded = isinstance(placement, Shard)
            if sharded or isinstance(placement, OnRank) or placement == PARTIAL_GRAD:
                local_shape = placement.local_shape(shape, shards.rank) if sharded else shape
                if gradient is None:
                    gradient = torch.zeros(local_shape, dtype=dtype, device=device)
                if sharded:
                    gradient = spill.kept(gather_parts(gradient, placement, shards, "a gradient"))
                else:
                    gradient = spill.kept(shards.all_reduce(gradient.contiguous(), "a gradient"))
            whole.append(gradient)
        return None, None, *whole
