"""Whether the shards of a part together are the part."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.replica.pipeline.base import Part
from paceline.replica.tensor.rehearsal import check_shard
from paceline.replica.tensor.rewrite import Shard
from paceline.replica.tensor.shards import Shards


def check_part(shard: Shard, part: Part, given: Sequence[Any], shards: Shards) -> None:
    """Compare a part's shards with it: what it gives, gradients and buffers. All of them call it together.

    Args:
        shard: of the part.
        part: as it was cut.
        given: what it is given for a micro-batch.
        shards: who run it together.

    Raises:
        InputError: names the first thing that differs.
    """
    received = range(len(part.inputs), len(given))
    tensors = [index for index, value in enumerate(given) if isinstance(value, Tensor)]
    places = frozenset(place for place, index in enumerate(tensors) if index in received)
    form = _Form(given, tensors)
    check_shard(
        shard, form, _Fed(part.module, form), tuple(given[i] for i in tensors), shards, samples=(), of_inputs=places
    )


@final
class _Form:
    """Inputs are the tensors among what is given; the rest stays as it is."""

    def __init__(self, given: Sequence[Any], tensors: Sequence[int]) -> None:
        self._given, self._tensors = list(given), list(tensors)

    def flat(self, inputs: Any) -> list[Any]:
        """All that is given."""
        made = list(self._given)
        for index, tensor in zip(self._tensors, inputs, strict=True):
            made[index] = tensor
        return made

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """What is given away, tensors alone."""
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


@final
class _Fed(nn.Module):
    """A part that takes tensors alone; it has the part's own tensors, under the same names."""

    _run: Callable[..., Any]

    def __init__(self, part: torch.fx.GraphModule, form: _Form) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = part._modules, part._parameters, part._buffers
        vars(self)["_run"] = part.forward
        self._form = form

    def forward(self, *tensors: Tensor) -> Any:
        """What the part gives for them."""
        return self._form.rebuild(self._run(*self._form.flat(tensors)))
