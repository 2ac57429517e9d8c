"""From a model to the parts of a pipeline: captured, measured, cut, and verified in one process; and a cut as text."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from paceline.core.errors import InputError
from paceline.core.formatting import aligned, amount
from paceline.program import Program, Tree, call
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture, is_sequential
from paceline.replica.capture.input_spec import flatten_tree
from paceline.replica.capture.verify import check
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout
from paceline.replica.module_utils import get_or_create_submodule, preserve_state, preserve_tensors, tensors_of
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut import Cut, Part, cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.micro_batches import micro_batch_sizes
from paceline.replica.pipeline.partition import Boundaries, MemoryLimit, named_boundaries, partition
from paceline.schedule import Dependencies, Need, in_flight
from paceline.strategy import Strategy

# Units of the last place: a loss that is added up in two orders differs by a few.
ROUNDING = 64


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
    """A part that has been run.

    Args:
        arguments: leaves of the input, then received values.
    """

    part: Part
    arguments: list[Any]
    outputs: Sequence[Any]


def run_parts(cut: Cut, leaves: Sequence[Tensor]) -> Iterator[PartRun]:
    """Run all parts of a model in order, on the leaves of its input.

    Values arrive as they do at another worker: contiguous, in memory of their own. Gradients go back the same way.

    Raises:
        InputError: a part writes a value that it has received and whose gradient goes back.
    """
    values: dict[str, Any] = {}
    for part in cut.parts:
        arguments = [*(leaves[i] for i in part.inputs), *(values[crossing.name] for crossing in part.received)]
        copies = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in arguments]
        outputs = part.module(*copies)
        for crossing, copy in zip(part.received, copies[len(part.inputs) :], strict=True):
            value = values[crossing.name]
            if isinstance(value, Tensor) and value.requires_grad and copy._version:
                raise InputError(
                    f"stage {part.number} writes {crossing.name}, which it receives, in place; write inplace=False "
                    "there, or cuts= elsewhere"
                )
        values |= {crossing.name: value for crossing, value in zip(part.sent, outputs, strict=False)}
        yield PartRun(part, arguments, outputs)


def part_arguments(cut: Cut, module: nn.Module, leaves: Sequence[Tensor]) -> list[list[Any]]:
    """Return the arguments of each part, detached: those whose gradients go back are leaves that need one.

    Args:
        cut: of ``module``, whose tensors are left as they were.
        module: the model.
        leaves: of its input.
    """

    def detached(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    with preserve_tensors(module):
        return [[detached(argument) for argument in run.arguments] for run in run_parts(cut, leaves)]


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
        *_, last = run_parts(cut, cut.captured.flatten(inputs))
        return cut.captured.rebuild(last.outputs[len(last.part.sent) :])

    description, training = f"cut into {len(cut.parts)} parts", cut.captured.training
    check(module, run, named, inputs, description=description, samples=samples, training=training)


@dataclass(frozen=True)
class PreparedCut:
    """A model that has been cut, with the reasons for its boundaries.

    Args:
        costs: None where another worker has measured them.
    """

    cut: Cut
    units: Units
    boundaries: Boundaries
    costs: Costs | None


# Returns on all workers of a replica the boundaries that one of them computes.
Agree = Callable[[Callable[[], Boundaries]], Boundaries]


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
    limit, stage_replicas = None, strategy.mesh.stage_replicas
    owners = [order.worker_of(part, workers) for part in range(parts)]
    if strategy.stage_memory_bytes is not None:
        flying = [in_flight(order, owner, workers, strategy.micro_batch_count, stage_replicas) for owner in owners]
        limit = MemoryLimit(strategy.stage_memory_bytes // order.chunks, flying, parameter_copies(program, module))
    replicas = [stage_replicas.copies[owner] for owner in owners]
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


_TITLES = ("stage", "replicas", "from", "to", "time", "parameters", "sends", "tied")
_RIGHT = ("stage", "replicas", "time", "parameters")


def cut_table(cut: Cut, units: Units, costs: Costs, replicas: Sequence[int] = ()) -> str:
    """Return one line for each part: its ends, its share of the time, its parameters, bytes sent, and tied parameters.

    Where parts have several ``replicas``, their number is a column; the slowest part is that which keeps each of its
    replicas busy longest. Names of modules, and of nodes in parentheses, can be written as ``cuts``::

        2 stages; slowest: 12.1 ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward

        stage  from             to               time  parameters  sends          tied
            0  transformer.wte  transformer.h.2  49 %      12,544  to 1: 36.9 kB  transformer.wte.weight (also 1)
            1  ...
    """
    unit_of = units.nodes()
    calls = [[node.name for node in part.module.graph.nodes if node.op.startswith("call")] for part in cut.parts]
    own = [sorted({unit_of[name] for name in names if name in unit_of}) for names in calls]
    seconds = [math.fsum(costs.units.seconds[unit] for unit in part) for part in own]
    replicas = replicas or [1] * len(seconds)
    total = sum(seconds)

    lines = []
    for part, inside, time, count in zip(cut.parts, own, seconds, replicas, strict=True):
        sent = Counter[int]()
        for crossing in part.sent:
            for consumer in crossing.consumers:
                sent[consumer] += costs.sizes.get(crossing.name, 0)
        tied = (
            f"{name} (also {', '.join(str(other) for other in holders if other != part.number)})"
            for name, holders in cut.tied.items()
            if part.number in holders
        )
        line = (
            str(part.number),
            str(count) if max(replicas) > 1 else "",
            _name(units.groups[inside[0]][0], units, set(inside)),
            _name(units.groups[inside[-1]][-1], units, set(inside)),
            f"{time / total:.0%}".replace("%", " %") if total else "",
            f"{sum(p.numel() for p in part.module.parameters()):,}",
            ", ".join(f"to {consumer}: {amount(sent[consumer])}" for consumer in sorted(sent)),
            ", ".join(tied),
        )
        lines.append(line)

    slowest = max(each / count for each, count in zip(seconds, replicas, strict=True))
    head = (
        f"{len(lines)} stage{'s' if len(lines) > 1 else ''}; slowest: {slowest * 1e3:.3g} ms, forward and backward of "
        "one micro-batch; bytes sent: of one micro-batch, forward"
    )
    shown = [i for i in range(len(_TITLES)) if any(line[i] for line in lines)]
    rows = [[row[i] for i in shown] for row in (_TITLES, *lines)]
    return "\n".join([head, "", *aligned(rows, _RIGHT)])


def _name(node: Node, units: Units, inside: set[int]) -> str:
    """Return the largest module around a node that is wholly in the part; if none is, its own and the node's name."""
    owners = units.captured.owners
    owner = owners.get(node.name, "")
    names = owner.split(".") if owner else []
    for length in range(1, len(names) + 1):
        name = ".".join(names[:length])
        of_module = {u for node, u in units.place.items() if f"{owners.get(node.name, '')}.".startswith(f"{name}.")}
        if of_module <= inside:
            return name
    return f"{owner} ({node.name})" if owner else node.name
