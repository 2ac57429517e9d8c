"""Capture, measure, cut and verify a model: from a module to parts that compute what it computes.

The parts of a model one after another in this process, each given what the ones before it have made.

All parts of a model one after another in this process: what a pipeline computes, without a pipeline.

From a model as it is to parts that do what it does: captured, measured, cut, checked.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.capture.input_spec import taken_apart
from paceline.replica.capture.sequential_graph import is_sequential
from paceline.replica.capture.verify import check
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout
from paceline.replica.module_utils import get_or_create_submodule, preserve_state, preserve_tensors, tensors_of
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from paceline.replica.pipeline.partition import Boundaries, Limit, named, partition
from paceline.schedule import Dependencies, Need, in_flight
from paceline.strategy import Strategy

ROUNDING = 64
"""In units of the last place: a loss that is added up in two orders differs by a few."""


def refuse_loss(program: Program, module: nn.Module, batch: Batch, count: int) -> None:
    """Raise InputError where the loss of a batch is not Σ n_i/n · loss_i over its micro-batches.

    Args:
        program: says the loss.
        module: gives the output, once for the whole batch, so that only the loss is looked at.
        batch: any.
        count: m.
    """
    with preserve_state(module), torch.no_grad():
        output = call(module, batch.input)
        whole = program.loss(output, batch.target)
        losses = [
            program.loss(rows(output, batch.samples, piece), rows(batch.target, batch.samples, piece)) * share
            for piece, share in _pieces(micro_batch_sizes(batch.samples, count))
        ]
    total = float(sum(losses))
    bound = ROUNDING * torch.finfo(whole.dtype).eps * max(1.0, abs(float(whole)))
    if not abs(total - float(whole)) <= bound:
        raise InputError(
            f"the loss of the first batch is {float(whole):.6g}, but of its {len(losses)} micro-batches {total:.6g}, "
            "weighed by their samples: it is no mean over samples (a sum, or a mean over what some samples have more "
            "of), so a pipeline would train something else; write a loss that is, or micro_batches=1"
        )


def rows(tree: Tree, samples: int, piece: slice) -> Tree:
    """A tree with some rows of each tensor that has one for each sample."""
    found: list[Tensor] = []
    rebuild = taken_apart(tree, found)
    return rebuild([leaf[piece] if leaf.dim() and len(leaf) == samples else leaf for leaf in found])


def _pieces(each: Sequence[int]) -> Iterator[tuple[slice, float]]:
    """Which rows a micro-batch has, and its share of all."""
    start = 0
    for size in each:
        yield slice(start, start + size), size / sum(each)
        start += size


class Fed(NamedTuple):
    """A part that has been run."""

    part: Part
    given: list[Any]
    """Leaves of the input, then what was received."""
    made: Sequence[Any]


def fed(cut: Cut, leaves: Sequence[Tensor]) -> Iterator[Fed]:
    """All parts, in order.

    Args:
        cut: of a model.
        leaves: of its input.
    """
    values: dict[str, Any] = {}
    for part in cut.parts:
        given = [*(leaves[i] for i in part.inputs), *(values[crossing.name] for crossing in part.received)]
        made = part.module(*(each.clone() if isinstance(each, Tensor) else each for each in given))
        values |= {crossing.name: value for crossing, value in zip(part.sent, made, strict=False)}
        yield Fed(part, given, made)


def dependencies(cut: Cut, module: nn.Module, leaves: Sequence[Tensor]) -> Dependencies:
    """Which parts need which; only a run tells of which values gradients go back.

    Args:
        cut: of the model.
        module: the model, which is left as it was.
        leaves: of its input, for a few samples.
    """
    with preserve_tensors(module):
        needs = [need for each in fed(cut, leaves) for need in _needs(each)]
    return Dependencies.of(len(cut.parts), needs)


def _needs(of: Fed) -> Iterator[Need]:
    for crossing, value in zip(of.part.sent, of.made, strict=False):
        gradient = isinstance(value, Tensor) and value.requires_grad
        yield from (Need(crossing.source, consumer, gradient) for consumer in crossing.consumers)


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
        return cut.captured.rebuild(chained(cut, cut.captured.flatten(given)))

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
        final, spill = list(gradients), SpillAllocator()
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


@dataclass(frozen=True)
class Prepared:
    """A model that has been cut, and why there."""

    cut: Cut
    units: Units
    boundaries: Boundaries
    costs: Costs | None
    """None where another worker has measured them."""


Agree = Callable[[Callable[[], Boundaries]], Boundaries]
"""Gives all workers of a replica what one of them computes."""


def prepared(program: Program, strategy: Strategy, module: nn.Module, batch: Batch, agree: Agree) -> Prepared:
    """The parts of a model for one strategy.

    Args:
        program: whose model it is.
        strategy: says schedule, stages, micro-batches, where to cut and how much memory there is.
        module: with the values of A_0, on the device where it will run; its tensors are the parts'.
        batch: the first one.
        agree: costs are measured by one worker for all.

    Raises:
        InputError: the model can't be captured or cut so, or micro-batches would change what the loss is.
    """
    first = first_rows(strategy, batch)
    device = next(module.parameters()).device
    costs: list[Costs] = []
    with program.autocast(str(device)):
        units = _units(program, strategy, module, batch)

        def chosen() -> Boundaries:
            costs.append(measure(units, units.captured.flatten(first)))
            return boundaries(program, strategy, module, units, costs[0])

        where = agree(chosen)
        made = cut(units, where)
        _keep_unused(made, module)
        check_cut(made, module, first)
    return Prepared(made, units, where, costs[0] if costs else None)


def first_rows(strategy: Strategy, batch: Batch) -> Tree:
    """The input of the first micro-batch of a batch."""
    return rows(batch.input, batch.samples, slice(micro_batch_sizes(batch.samples, strategy.micro_batch_count)[0]))


def cut_as_named(program: Program, strategy: Strategy, module: nn.Module, batch: Batch) -> Cut:
    """The parts of a model where a strategy says where to cut: nothing is measured, and no part has been run.

    Args and raises: as :func:`prepared`.
    """
    with program.autocast(str(next(module.parameters()).device)):
        units = _units(program, strategy, module, batch)
        parts = strategy.order.parts(strategy.stage_count)
        return cut(units, named(strategy.cuts, parts, units.modules(), units.nodes()))


def needed(program: Program, made: Cut, module: nn.Module, batch: Batch) -> Dependencies:
    """Which parts of a model need which, found with two samples of a batch."""
    with program.autocast(str(next(module.parameters()).device)):
        return dependencies(made, module, made.captured.flatten(rows(batch.input, batch.samples, slice(2))))


def _units(program: Program, strategy: Strategy, module: nn.Module, batch: Batch) -> Units:
    """Of the model, captured with a micro-batch."""
    refuse_loss(program, module, batch, strategy.micro_batch_count)
    return units_of(strategy, module, first_rows(strategy, batch))


def units_of(strategy: Strategy, module: nn.Module, inputs: Tree, *, training: bool = True) -> Units:
    """Of a model that is captured for a strategy.

    The children of an nn.Sequential are looked into only where that is asked for: by shards, or by cuts within one.
    """
    operators = strategy.tensor_parallel
    found = group(capture(module, inputs, operators=operators, training=training))
    inside = dict(module.named_modules()).keys() - found.modules().keys()
    if operators or not is_sequential(module) or inside.isdisjoint(strategy.cuts):
        return found
    return group(capture(module, inputs, operators=True, training=training))


def _keep_unused(made: Cut, module: nn.Module) -> None:
    """Let the last part hold the parameters that no part reads: an optimizer may decay them all the same."""
    held = {name for part in made.parts for name in tensors_of(part.module)}
    for name, parameter in module.named_parameters():
        if name not in held:
            path, _, leaf = name.rpartition(".")
            get_or_create_submodule(made.parts[-1].module, path).register_parameter(leaf, parameter)


def boundaries(program: Program, strategy: Strategy, module: nn.Module, units: Units, costs: Costs) -> Boundaries:
    """Where to cut: where the strategy says so, else where that is best for these costs."""
    order, workers = strategy.order, strategy.stage_count
    parts = order.parts(workers)
    if strategy.cuts:
        return named(strategy.cuts, parts, units.modules(), units.nodes())
    limit, columns = None, strategy.mesh.columns
    turns = [columns.copies[order.worker_of(part, workers)] for part in range(parts)]
    if strategy.stage_memory_bytes is not None:
        owners = [order.worker_of(part, workers) for part in range(parts)]
        flying = [in_flight(order, owner, workers, strategy.micro_batch_count, columns) for owner in owners]
        limit = Limit(strategy.stage_memory_bytes // order.chunks, flying, copies(program, module))
    return partition(costs.row, parts, candidates=units.candidates, limit=limit, turns=turns)


def copies(program: Program, module: nn.Module) -> int:
    """How many times a parameter is held: with its gradient, and with what the optimizer remembers of it."""
    layout = FlatLayout.of(module)
    smallest = min((e for block in layout.parameters for e in block.entries), key=lambda e: e.stop - e.start)
    state = layout.part({smallest.name}).new()
    for vector in state.parameters:
        vector.zero_()
    return 2 + FlatOptimizer(program.optimizer, None, state, state.clone()).state_count
