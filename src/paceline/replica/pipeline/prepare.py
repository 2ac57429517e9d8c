"""From a model to the parts of a pipeline: captured, measured, cut, and verified in one process."""

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
from paceline.replica.capture.input_spec import flatten_tree
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
from paceline.replica.pipeline.partition import Boundaries, MemoryLimit, named_boundaries, partition
from paceline.schedule import Dependencies, Need, in_flight
from paceline.strategy import Strategy

ROUNDING = 64
"""Units of the last place: a loss that is added up in two orders differs by a few."""


def check_loss(program: Program, module: nn.Module, batch: Batch, count: int) -> None:
    """Raise InputError where the loss of a batch is not Σ n_i/n · loss_i over its micro-batches.

    Args:
        program: holds the loss.
        module: computes the output, once for the whole batch, so that only the loss is compared.
        batch: any.
        count: m.
    """
    with preserve_state(module), torch.no_grad():
        output = call(module, batch.input)
        whole = program.loss(output, batch.target)
        losses, start = [], 0
        for size in micro_batch_sizes(batch.samples, count):
            own = slice(start, start + size)
            outputs, targets = (select_rows(tree, batch.samples, own) for tree in (output, batch.target))
            losses.append(program.loss(outputs, targets) * (size / batch.samples))
            start += size
    total = float(sum(losses))  # in the order in which a pipeline adds them
    bound = ROUNDING * torch.finfo(whole.dtype).eps * max(1.0, abs(float(whole)))
    if not abs(total - float(whole)) <= bound:
        raise InputError(
            f"the loss of the first batch is {float(whole):.6g}, but of its {len(losses)} micro-batches {total:.6g}, "
            "weighed by their samples: it is no mean over samples (a sum, or a mean over what some samples have more "
            "of), so a pipeline would train something else; write a loss that is, or micro_batches=1"
        )


def select_rows(tree: Tree, samples: int, rows: slice) -> Tree:
    """Return a tree with some rows of each tensor that has one for each sample."""
    tensors: list[Tensor] = []
    rebuild = flatten_tree(tree, tensors)
    return rebuild([leaf[rows] if leaf.dim() and len(leaf) == samples else leaf for leaf in tensors])


class PartRun(NamedTuple):
    """A part that has been run."""

    part: Part
    arguments: list[Any]
    """Leaves of the input, then received values."""
    outputs: Sequence[Any]


def run_parts(cut: Cut, leaves: Sequence[Tensor]) -> Iterator[PartRun]:
    """Run all parts of a model in order, on the leaves of its input."""
    values: dict[str, Any] = {}
    for part in cut.parts:
        arguments = [*(leaves[i] for i in part.inputs), *(values[crossing.name] for crossing in part.received)]
        outputs = part.module(*(each.clone() if isinstance(each, Tensor) else each for each in arguments))
        values |= {crossing.name: value for crossing, value in zip(part.sent, outputs, strict=False)}
        yield PartRun(part, arguments, outputs)


Source: TypeAlias = str | int | Tensor
"""A crossing's name, the index of an input's leaf, or a parameter."""


def check_cut(cut: Cut, module: nn.Module, inputs: Tree, *, samples: Sequence[int] = (2, 3)) -> None:
    """Compare the parts with the model that they were cut from: outputs, gradients and buffers, by name.

    Args:
        cut: of ``module``, whose own tensors its parts hold.
        module: the model.
        inputs: a batch, as the model is called with it.
        samples: sizes of the batches that are compared.

    Raises:
        InputError: names the first thing that differs.
    """

    def named() -> Mapping[str, Tensor]:
        return {name: tensor for part in cut.parts for name, tensor in tensors_of(part.module).items()}

    def run(inputs: Tree) -> Tree:
        return cut.captured.rebuild(run_as_pipeline(cut, cut.captured.flatten(inputs)))

    what, training = f"cut into {len(cut.parts)} parts", cut.captured.training
    check(module, run, named, inputs, what=what, samples=samples, training=training)


def run_as_pipeline(cut: Cut, leaves: Sequence[Tensor]) -> list[Any]:
    """Return the leaves of the output, computed part by part.

    Values cross as they do between workers: contiguous, without their history. In backward each part is given the
    gradients of the values that it has sent, summed over consumers in ascending order.
    """
    parameters = list(dict.fromkeys(p for part in cut.parts for p in part.module.parameters() if p.requires_grad))
    outputs: list[Any] = []
    tensors = _Chain.apply(cut, outputs, len(leaves), *leaves, *parameters)  # type: ignore[no-untyped-call]
    remaining = iter(tensors if isinstance(tensors, tuple) else (tensors,))
    return [next(remaining) if isinstance(value, Tensor) else value for value in outputs]


class _Chain(torch.autograd.Function):
    """All parts as one operator, so that gradients pass from part to part and nowhere else."""

    @staticmethod
    def forward(ctx: Any, cut: Cut, outputs: list[Any], count: int, *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.runs, ctx.keys = [], [*range(count), *arguments[count:]]
        values: dict[str, Any] = {}
        with torch.enable_grad():
            for part in cut.parts:
                ctx.runs.append(_IsolatedRun(part, arguments[:count], values))
                values |= ctx.runs[-1].sent
        outputs.extend(ctx.runs[-1].outputs)
        tensors = tuple(value.detach() for value in outputs if isinstance(value, Tensor))
        ctx.mark_non_differentiable(*(t for t in tensors if not t.is_floating_point()))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        terms: dict[Source, dict[int, Tensor]] = {}

        def total(source: Source) -> Tensor | None:
            # Parts in ascending order, as a pipeline's workers add them.
            of_parts = [gradient for _, gradient in sorted(terms.get(source, {}).items())]
            return functools.reduce(torch.add, of_parts) if of_parts else None

        of_outputs, spill = list(gradients), SpillAllocator()
        for run in reversed(ctx.runs):
            for source, gradient in run.backward([total(name) for name in run.sent], of_outputs):
                terms.setdefault(source, {})[run.number] = spill.kept(gradient)
            of_outputs = []
        return None, None, None, *map(total, ctx.keys)


class _IsolatedRun:
    """One part's forward on inputs without a history, with what its backward needs."""

    def __init__(self, part: Part, leaves: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        own: dict[Source, Any] = {index: self._received(leaves[index]) for index in part.inputs}
        received: dict[Source, Any] = {each.name: self._received(values[each.name]) for each in part.received}
        self.number = part.number
        # A model may write its inputs, but torch forbids that for a leaf that needs a gradient.
        results = part.module(*(leaf.clone() for leaf in own.values()), *received.values())
        self.sent = {crossing.name: value for crossing, value in zip(part.sent, results, strict=False)}
        self.outputs = results[len(part.sent) :]
        self._sources = own | received
        self._sources.update((parameter, parameter) for parameter in part.module.parameters())

    def backward(
        self, of_sent: Sequence[Tensor | None], of_outputs: Sequence[Tensor | None]
    ) -> Iterator[tuple[Source, Tensor]]:
        """Yield the gradients of inputs and parameters from those of sent values and of the model's outputs."""
        results = [*self.sent.values(), *(value for value in self.outputs if isinstance(value, Tensor))]
        pairs = zip(results, [*of_sent, *of_outputs], strict=True)
        ends = [(value, gradient) for value, gradient in pairs if gradient is not None and value.requires_grad]
        sources = {key: t for key, t in self._sources.items() if isinstance(t, Tensor) and t.requires_grad}
        if ends and sources:
            values, gradients = zip(*ends, strict=True)
            computed = torch.autograd.grad(values, list(sources.values()), gradients, allow_unused=True)
            yield from ((key, g) for key, g in zip(sources, computed, strict=True) if g is not None)

    @staticmethod
    def _received(value: Any) -> Any:
        """Return a value as it would arrive: its numbers alone, contiguous."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class PreparedCut:
    """A model that has been cut, with the reasons for its boundaries."""

    cut: Cut
    units: Units
    boundaries: Boundaries
    costs: Costs | None
    """None where another worker has measured them."""


Agree = Callable[[Callable[[], Boundaries]], Boundaries]
"""Returns on all workers of a replica the boundaries that one of them computes."""


def prepare_cut(program: Program, strategy: Strategy, module: nn.Module, batch: Batch, agree: Agree) -> PreparedCut:
    """Capture, measure, cut and verify a model for one strategy.

    Args:
        program: whose model it is.
        strategy: gives schedule, stages, micro-batches, cuts and the memory limit.
        module: with the values of A_0, on the device where it will run; its tensors are the parts'.
        batch: the first one.
        agree: costs are measured by one worker for all.

    Raises:
        InputError: the model can't be captured or cut so, or micro-batches would change the loss.
    """
    first = first_rows(strategy, batch)
    costs: list[Costs] = []
    with program.autocast(str(next(module.parameters()).device)):
        check_loss(program, module, batch, strategy.micro_batch_count)
        units = capture_units(strategy, module, first)

        def choose() -> Boundaries:
            costs.append(measure(units, units.captured.flatten(first)))
            return choose_boundaries(program, strategy, module, units, costs[0])

        boundaries = agree(choose)  # measured times differ from worker to worker, boundaries may not
        parts = cut(units, boundaries)
        # The last part holds the parameters that no part reads: an optimizer may decay them all the same.
        held = {name for part in parts.parts for name in tensors_of(part.module)}
        for name, parameter in module.named_parameters():
            if name not in held:
                path, _, leaf = name.rpartition(".")
                get_or_create_submodule(parts.parts[-1].module, path).register_parameter(leaf, parameter)
        check_cut(parts, module, first)
    return PreparedCut(parts, units, boundaries, costs[0] if costs else None)


def first_rows(strategy: Strategy, batch: Batch) -> Tree:
    """Return the input of the first micro-batch of a batch."""
    sizes = micro_batch_sizes(batch.samples, strategy.micro_batch_count)
    return select_rows(batch.input, batch.samples, slice(sizes[0]))


def cut_as_named(program: Program, strategy: Strategy, module: nn.Module, batch: Batch) -> Cut:
    """Cut a model where a strategy names its cuts: nothing is measured, and no part is run.

    Args and raises: as :func:`prepare_cut`.
    """
    with program.autocast(str(next(module.parameters()).device)):
        check_loss(program, module, batch, strategy.micro_batch_count)
        units = capture_units(strategy, module, first_rows(strategy, batch))
        parts = strategy.order.parts(strategy.stage_count)
        return cut(units, named_boundaries(strategy.cuts, parts, units.modules(), units.nodes()))


def part_dependencies(program: Program, cut: Cut, module: nn.Module, batch: Batch) -> Dependencies:
    """Return which parts of a model need which.

    The parts are run on two samples of a batch, since only a run shows of which values gradients go back; the model is
    left as it was.
    """
    leaves = cut.captured.flatten(select_rows(batch.input, batch.samples, slice(2)))
    needs = []
    with program.autocast(str(next(module.parameters()).device)), preserve_tensors(module):
        for run in run_parts(cut, leaves):
            for crossing, value in zip(run.part.sent, run.outputs, strict=False):
                gradient = isinstance(value, Tensor) and value.requires_grad
                needs += [Need(crossing.source, consumer, gradient) for consumer in crossing.consumers]
    return Dependencies.of(len(cut.parts), needs)


def capture_units(strategy: Strategy, module: nn.Module, inputs: Tree, *, training: bool = True) -> Units:
    """Return the units of a model, captured for a strategy.

    The children of an nn.Sequential are captured as operators only if shards, or cuts within one, need that.
    """
    operators = strategy.tensor_parallel
    units = group(capture(module, inputs, operators=operators, training=training))
    inside = dict(module.named_modules()).keys() - units.modules().keys()
    if operators or not is_sequential(module) or inside.isdisjoint(strategy.cuts):
        return units
    return group(capture(module, inputs, operators=True, training=training))


def choose_boundaries(
    program: Program, strategy: Strategy, module: nn.Module, units: Units, costs: Costs
) -> Boundaries:
    """Return where to cut: where the strategy says so, else where that is best for these costs."""
    order, workers = strategy.order, strategy.stage_count
    parts = order.parts(workers)
    if strategy.cuts:
        return named_boundaries(strategy.cuts, parts, units.modules(), units.nodes())
    limit, columns = None, strategy.mesh.stage_replicas
    owners = [order.worker_of(part, workers) for part in range(parts)]
    if strategy.stage_memory_bytes is not None:
        flying = [in_flight(order, owner, workers, strategy.micro_batch_count, columns) for owner in owners]
        limit = MemoryLimit(strategy.stage_memory_bytes // order.chunks, flying, parameter_copies(program, module))
    replicas = [columns.copies[owner] for owner in owners]
    return partition(costs.units, parts, candidates=units.candidates, limit=limit, replicas=replicas)


def parameter_copies(program: Program, module: nn.Module) -> int:
    """Return how many times a parameter is held: itself, its gradient, and the vectors of the optimizer's state."""
    layout = FlatLayout.of(module)
    # An optimizer of one small tensor is enough to count its state.
    smallest = min((e for block in layout.parameters for e in block.entries), key=lambda e: e.stop - e.start)
    state = layout.part({smallest.name}).new()
    for vector in state.parameters:
        vector.zero_()
    return 2 + FlatOptimizer(program.optimizer, None, state, state.clone()).state_count
