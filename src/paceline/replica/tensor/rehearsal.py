"""Whether the shards together are the model: each compares all of it, tensor by tensor, by name."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.comm.spill import Spill
from paceline.program import Tree
from paceline.replica.selfcheck import check
from paceline.replica.tensor.layouts import SHARED, Layout, Owned, Split
from paceline.replica.tensor.parted import gathered
from paceline.replica.tensor.rewrite import Shard
from paceline.replica.tensor.shards import Shards
from paceline.replica.undisturbed import tensors_of

ULPS = 2.0**12
"""Shards add up in another order: a sum over n terms then differs by about √n units in the last place, and what follows
carries that on, layer by layer. A wrong cut differs by the size of the tensor itself, 2^23 units in float32."""

HALF = 2.0**-3
"""Of a tensor's largest element, in half precision or under autocast: a unit in the last place is 2^-7 of it in bf16,
and so much must not be asked for that a wrong cut would pass."""


class Formed(Protocol):
    """What knows the leaves of a model's inputs and outputs, as :class:`~paceline.replica.capture.Captured` does."""

    def flat(self, inputs: Tree) -> Sequence[Any]:
        """Those of an input."""

    def rebuild(self, leaves: Sequence[Any]) -> Tree:
        """The output of these."""


def check_shard(
    shard: Shard,
    captured: Formed,
    module: nn.Module,
    inputs: Tree,
    shards: Shards,
    *,
    samples: Sequence[int] = (2, 3),
    of_inputs: Collection[int] = (),
    training: bool = True,
) -> None:
    """Compare with the model: outputs, gradients and buffers. All shards call it together, and all come to one end.

    Args:
        shard: of ``captured``.
        captured: of ``module``.
        module: the model.
        inputs: a batch, as the model is called with it.
        shards: who run it together.
        samples: sizes of the batches that are looked at; none: the batch as it is.
        of_inputs: of which leaves of the input gradients are looked at; they are whole on every shard.
        training: the mode of the model in which ``captured`` was captured.

    Raises:
        InputError: names the first thing that differs.
    """
    stage = _Stage(shard, captured, module, shards)
    what = f"division into {shards.count} shards"
    ulps = _ulps(module)
    own: dict[str, Any] = {"samples": samples, "ulps": ulps, "of_inputs": of_inputs, "training": training}
    check(module, stage.run, stage.named, inputs, what=what, **own)


def _ulps(module: nn.Module) -> float:
    """See :data:`ULPS` and :data:`HALF`."""
    tensors = tensors_of(module).values()
    units = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    if any(torch.is_autocast_enabled(kind) for kind in {t.device.type for t in tensors}):
        return HALF / max(units)
    return min(ULPS, HALF / max(units))


class _Stage:
    """The shards' tensors as whole ones, from which each takes its part."""

    def __init__(self, shard: Shard, captured: Formed, module: nn.Module, shards: Shards) -> None:
        self._shard, self._captured, self._shards = shard, captured, shards
        self._model = tensors_of(module)
        self._parameters = {
            name: tensor.detach().requires_grad_(tensor.requires_grad)
            for name, tensor in self._model.items()
            if isinstance(tensor, nn.Parameter)
        }
        self._local = self._model.keys() - self._parameters.keys()
        self._after: dict[str, Tensor] = {}

    def named(self) -> Mapping[str, Tensor]:
        return self._parameters | self._after

    def run(self, given: Tree) -> Tree:
        names, own = list(self._parameters), tensors_of(self._shard.module)
        layouts = [self._layout(name) for name in names]
        parts = _Enter.apply(self._shards, layouts, *self._parameters.values())  # type: ignore[no-untyped-call]
        tensors = {name: part for name, part in zip(names, parts, strict=True) if name in own}
        buffers = {name: self._part(name, self._model[name]) for name in own if name in self._local}
        leaves = functional_call(self._shard.module, tensors | buffers, tuple(self._captured.flat(given)))
        owned = {name for name in self._local if isinstance(self._layout(name), Owned)}
        after = {name: buffers.get(name, self._model[name]) for name in self._model if name in buffers or name in owned}
        self._after = {name: self._whole(name, buffer) for name, buffer in after.items()}
        return self._captured.rebuild(leaves)

    def _layout(self, name: str) -> Layout | None:
        return self._shard.parameters.get(name)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        layout = self._layout(name)
        return (layout.take(tensor, self._shards.rank) if isinstance(layout, Split) else tensor).detach().clone()

    def _whole(self, name: str, part: Tensor) -> Tensor:
        layout = self._layout(name)
        if isinstance(layout, Owned):
            return self._shards.broadcast(part, layout.shard, name)
        return gathered(part, layout, self._shards, name) if isinstance(layout, Split) else part


class _Enter(torch.autograd.Function):
    """Whole parameters -> those of one shard; in backward the whole gradients, of all shards, on each of them."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, layouts: list[Layout | None], *whole: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.layouts, ctx.shapes = shards, layouts, [tensor.shape for tensor in whole]
        ctx.set_materialize_grads(False)
        made = []
        for layout, tensor in zip(layouts, whole, strict=True):
            part = layout.take(tensor, shards.rank) if isinstance(layout, Split) else tensor
            made.append(part.clone())
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        shards, found, spill = ctx.shards, list[Tensor | None](), Spill()
        for layout, shape, gradient in zip(ctx.layouts, ctx.shapes, gradients, strict=True):
            if isinstance(layout, Split):
                local = layout.local(shape, shards.rank)
                part = gradient if gradient is not None else _zeros(local, gradients)
                found.append(spill.kept(gathered(part, layout, shards, "a gradient")))
            elif isinstance(layout, Owned) or layout == SHARED:
                term = gradient if gradient is not None else _zeros(shape, gradients)
                found.append(spill.kept(shards.all_reduce(term.contiguous(), "a gradient")))
            else:
                found.append(gradient)
        return None, None, *found


def _zeros(shape: Any, others: tuple[Tensor | None, ...]) -> Tensor:
    alike = next(t for t in others if t is not None)
    return alike.new_zeros(shape)
