"""From a model as it is to parts that do what it does: captured, measured, cut, checked."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from paceline.program import Program, Tree
from paceline.replica.base import Batch
from paceline.replica.capture import capture
from paceline.replica.naming import home
from paceline.replica.pipeline.base import Cut
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.feeding import dependencies
from paceline.replica.pipeline.loss import refuse_loss, rows
from paceline.replica.pipeline.micro_batches import sizes
from paceline.replica.pipeline.partition import Boundaries, Limit, named, partition
from paceline.replica.pipeline.rehearsal import check_cut
from paceline.replica.pipeline.units import Units, group
from paceline.replica.sequential import is_sequential
from paceline.replica.state import Layout
from paceline.replica.stepper import Stepper
from paceline.replica.undisturbed import tensors_of
from paceline.schedule import Dependencies, in_flight
from paceline.strategy import Strategy


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
            costs.append(measure(units, units.captured.flat(first)))
            return boundaries(program, strategy, module, units, costs[0])

        where = agree(chosen)
        made = cut(units, where)
        _keep_unused(made, module)
        check_cut(made, module, first)
    return Prepared(made, units, where, costs[0] if costs else None)


def first_rows(strategy: Strategy, batch: Batch) -> Tree:
    """The input of the first micro-batch of a batch."""
    return rows(batch.input, batch.samples, slice(sizes(batch.samples, strategy.micro_batch_count)[0]))


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
        return dependencies(made, module, made.captured.flat(rows(batch.input, batch.samples, slice(2))))


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
            home(made.parts[-1].module, path).register_parameter(leaf, parameter)


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
    layout = Layout.of(module)
    smallest = min((e for block in layout.parameters for e in block.entries), key=lambda e: e.stop - e.start)
    state = layout.part({smallest.name}).new()
    for vector in state.parameters:
        vector.zero_()
    return 2 + Stepper(program.optimizer, None, state, state.clone()).remembers
