"""All parts of a model one after another in this process: what a pipeline computes, without a pipeline."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.comm.spill import Spill
from paceline.program import Tree
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.selfcheck import check
from paceline.replica.undisturbed import tensors_of

Source: TypeAlias = str | int | Tensor
"""A crossing's name, the index of an input's leaf, or a parameter."""


def check_cut(cut: Cut, module: nn.Module, inputs: Tree, *, samples: Sequence[int] = (2, 3)) -> None:
    """Compare the parts with the model that they were cut from: outputs, gradients and buffers, by name.

    Args:
        cut: of ``module``, whose own tensors its parts hold.
        module: the model.
        inputs: a batch, as the model is called with it.
        samples: sizes of the batches that are looked at.

    Raises:
        InputError: names the first thing that differs.
    """

    def named() -> Mapping[str, Tensor]:
        return {name: tensor for part in cut.parts for name, tensor in tensors_of(part.module).items()}

    def run(given: Tree) -> Tree:
        return cut.captured.rebuild(chained(cut, cut.captured.flat(given)))

    what, training = f"cut into {len(cut.parts)} parts", cut.captured.training
    check(module, run, named, inputs, what=what, samples=samples, training=training)


def chained(cut: Cut, leaves: Sequence[Tensor]) -> list[Any]:
    """The leaves of the output, computed part by part.

    Whatever crosses does so as it would between workers: contiguous, without its history. In backward each part is
    given the gradients of what it has sent, the sum over consumers in ascending order.
    """
    parameters = list(dict.fromkeys(p for part in cut.parts for p in part.module.parameters() if p.requires_grad))
    outputs: list[Any] = []
    found = _Chain.apply(cut, outputs, len(leaves), *leaves, *parameters)  # type: ignore[no-untyped-call]
    flowing = iter(found if isinstance(found, tuple) else (found,))
    return [next(flowing) if isinstance(value, Tensor) else value for value in outputs]


class _Chain(torch.autograd.Function):
    """All parts as one operator, so that its gradients are carried from part to part and nowhere else."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, outputs: list[Any], count: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.runs, ctx.keys = [], [*range(count), *given[count:]]
        values: dict[str, Any] = {}
        with torch.enable_grad():
            for part in cut.parts:
                ctx.runs.append(_Run(part, given[:count], values))
                values |= ctx.runs[-1].sent
        outputs.extend(ctx.runs[-1].outputs)
        made = tuple(value.detach() for value in outputs if isinstance(value, Tensor))
        ctx.mark_non_differentiable(*(t for t in made if not t.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        came: dict[Source, dict[int, Tensor]] = {}
        final, spill = list(gradients), Spill()
        for run in reversed(ctx.runs):
            for source, gradient in run.backward([_sum(came, name) for name in run.sent], final):
                came.setdefault(source, {})[run.number] = spill.kept(gradient)
            final = []
        return None, None, None, *(_sum(came, key) for key in ctx.keys)


class _Run:
    """One part's forward, and what its backward needs."""

    def __init__(self, part: Part, leaves: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        own: dict[Source, Any] = {index: _arrived(leaves[index]) for index in part.inputs}
        received: dict[Source, Any] = {each.name: _arrived(values[each.name]) for each in part.received}
        self.number = part.number
        # A model may write what it is given, but torch forbids that for a leaf that needs a gradient.
        results = part.module(*(leaf.clone() for leaf in own.values()), *received.values())
        self.sent = {crossing.name: value for crossing, value in zip(part.sent, results, strict=False)}
        self.outputs = results[len(part.sent) :]
        self._sources = own | received
        self._sources.update((parameter, parameter) for parameter in part.module.parameters())

    def backward(
        self, sent: Sequence[Tensor | None], final: Sequence[Tensor | None]
    ) -> Iterator[tuple[Source, Tensor]]:
        """The gradients of all that the part was given and holds, from those of what it sends and of the outputs."""
        made = [*self.sent.values(), *(value for value in self.outputs if isinstance(value, Tensor))]
        ends = [(v, g) for v, g in zip(made, [*sent, *final], strict=True) if g is not None and v.requires_grad]
        sources = {key: t for key, t in self._sources.items() if isinstance(t, Tensor) and t.requires_grad}
        if ends and sources:
            values, gradients = zip(*ends, strict=True)
            found = torch.autograd.grad(values, list(sources.values()), gradients, allow_unused=True)
            yield from ((key, g) for key, g in zip(sources, found, strict=True) if g is not None)


def _arrived(value: Any) -> Any:
    """What arrives where it is sent: the numbers alone."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def _sum(came: Mapping[Source, Mapping[int, Tensor]], source: Source) -> Tensor | None:
    """The gradients that parts have given for one thing, added in their ascending order."""
    gradients = [gradient for _, gradient in sorted(came.get(source, {}).items())]
    return functools.reduce(torch.add, gradients) if gradients else None
