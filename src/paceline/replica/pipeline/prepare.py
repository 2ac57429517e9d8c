"""From a model to the parts of a pipeline: captured, measured, cut, and verified in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.program import Program, Tree
from paceline.replica.base import Batch
from paceline.replica.capture.capture import (
    Captured,
    capture,
    check_captured,
    for_several,
    is_sequential,
    takes_one,
)
from paceline.replica.capture.handover import Obtain, capture_here
from paceline.replica.capture.input_spec import batch_size
from paceline.replica.capture.looks import other_inputs
from paceline.replica.capture.verify import ModelRun, check, model_runs
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import FlatLayout
from paceline.replica.module_utils import get_or_create_submodule, preserve_tensors, tensors_of
from paceline.replica.pipeline.costs import Costs, measure
from paceline.replica.pipeline.cut import Cut, Part, cut
from paceline.replica.pipeline.cut_groups import Units, group
from paceline.replica.pipeline.loss_check import check_loss
from paceline.replica.pipeline.micro_batches import micro_batch_sizes, select_rows
from paceline.replica.pipeline.p2p_queue import as_sent
from paceline.replica.pipeline.partition import Boundaries, MemoryLimit, named_boundaries, partition
from paceline.schedule import Dependencies, Need, in_flight
from paceline.strategy import Strategy

# Time after which costs are not measured once more: those of operators that take long differ little.
ENOUGH_S: Seconds = 1.0


class Share(NamedTuple):
    """What one worker of a replica does of the work that one does for all.

    Args:
        obtain: captures the model, or takes another worker's capture of it.
        verifies: whether it verifies the graph, the cut, and that the loss can be divided into micro-batches.
        all_say: returns whether all workers say what this one says.
    """

    obtain: Obtain = capture_here
    verifies: bool = True
    all_say: Callable[[bool], bool] = bool


ALONE = Share()


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

    Values arrive as they do at another worker: dense, in memory of their own. Gradients go back the same way.

    Raises:
        InputError: a part writes a value that it has received and whose gradient goes back.
    """
    values: dict[str, Any] = {}
    for part in cut.parts:
        arguments = [*(leaves[i] for i in part.inputs), *(values[crossing.name] for crossing in part.received)]
        copies = [as_sent(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
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


def check_cut(
    cut: Cut,
    module: nn.Module,
    inputs: Tree,
    *,
    samples: Sequence[int] = (2, 3),
    runs: Sequence[ModelRun] | None = None,
) -> None:
    """Compare the parts with the model that they were cut from: outputs, gradients and buffers, by name.

    Args:
        cut: of ``module``, whose own tensors its parts hold.
        module: the model.
        inputs: a batch, as the model is called with it.
        samples: sizes of the batches that are compared.
        runs: the model's own of these, if there are any.

    Raises:
        InputError: names the first thing that differs.
    """

    def named() -> Mapping[str, Tensor]:
        return {name: tensor for part in cut.parts for name, tensor in tensors_of(part.module).items()}

    def run(inputs: Tree) -> Tree:
        *_, last = run_parts(cut, cut.captured.flatten(inputs))
        return cut.captured.rebuild(last.outputs[len(last.part.sent) :])

    description, training = f"cut into {len(cut.parts)} parts", cut.captured.training
    check(module, run, named, inputs, description=description, samples=samples, training=training, runs=runs)


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


def prepare_cut(
    program: Program,
    strategy: Strategy,
    module: nn.Module,
    batch: Batch,
    agree: Agree,
    share: Share = ALONE,
) -> PreparedCut:
    """Capture, measure, cut and verify a model for one strategy.

    Args:
        program: whose model it is.
        strategy: gives schedule, stages, micro-batches, cuts and the memory limit.
        module: with the values of A_0, on the device where it will run; its tensors are the parts'.
        batch: the first one.
        agree: costs are measured by one worker for all.
        share: what this worker does of what is verified once.

    Raises:
        InputError: the model can't be captured or cut so, or micro-batches would change the loss.
    """
    first = first_rows(strategy, batch)
    costs: list[Costs] = []
    with program.autocast(str(next(module.parameters()).device)):
        # First what needs no graph: another process may be capturing.
        if share.verifies:
            check_loss(program, module, batch, strategy.micro_batch_count)
        samples = _compared(module, first)
        runs = model_runs(module, first, samples) if share.verifies else []
        units = group(share.obtain(lambda: capture_for_stages(program, strategy, module, batch), module))
        # Another worker may be measuring meanwhile.
        one = not (share.verifies and units.captured.traced) or takes_one(units.captured, module, first)

        def choose() -> Boundaries:
            captured = units.captured if one else for_several(units.captured)
            costs.append(measure(units, captured.flatten(first), enough_s=ENOUGH_S))
            return choose_boundaries(program, strategy, module, units, costs[0])

        boundaries = agree(choose)  # measured times differ from worker to worker, boundaries may not
        if not share.all_say(one):
            units = replace(units, captured=for_several(units.captured))
            units.captured.flatten(first)
        parts = cut(units, boundaries)
        # The last part holds the parameters that no part reads: an optimizer may decay them all the same.
        held = {name for part in parts.parts for name in tensors_of(part.module)}
        for name, parameter in module.named_parameters():
            if name not in held:
                path, _, leaf = name.rpartition(".")
                get_or_create_submodule(parts.parts[-1].module, path).register_parameter(leaf, parameter)
        if share.verifies:
            _check_captured(parts, module, first, samples, runs)
    return PreparedCut(parts, units, boundaries, costs[0] if costs else None)


def _compared(module: nn.Module, inputs: Tree) -> Sequence[int]:
    """Return how many samples a graph's parts are compared with the model on.

    It was traced with as many as ``inputs`` has, or with three or more: a number that tracing has fixed shows with
    another one. The children of an nn.Sequential may not have been traced.
    """
    return (2,) if not is_sequential(module) and batch_size(inputs) != 2 else (2, 3)


def _check_captured(
    cut: Cut, module: nn.Module, inputs: Tree, samples: Sequence[int], runs: Sequence[ModelRun]
) -> None:
    """Compare the parts with the model; where they differ although the graph does not, it is the cut's fault.

    The parts are all of the graph, so the graph by itself is not run where they are right.
    """
    try:
        check_cut(cut, module, inputs, samples=samples, runs=runs)
    except InputError:
        if cut.captured.traced:
            check_captured(cut.captured, module, inputs, samples=samples)
        raise


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
        units = group(capture_for_stages(program, strategy, module, batch, verified=True))
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


def capture_for_stages(
    program: Program, strategy: Strategy, module: nn.Module, batch: Batch, *, verified: bool = False
) -> Captured:
    """Capture a model for a strategy, in training.

    Args and raises: as :func:`prepare_cut`, which verifies the graph with its parts.
    """
    others = other_inputs(program, batch.samples)
    return capture_units(strategy, module, first_rows(strategy, batch), others, verified=verified).captured


def capture_units(
    strategy: Strategy,
    module: nn.Module,
    inputs: Tree,
    others: Sequence[Tree] | None = None,
    *,
    training: bool = True,
    verified: bool = True,
) -> Units:
    """Return the units of a model, captured for a strategy.

    The children of an nn.Sequential are captured as operators only if shards, or cuts within one, need that. Args and
    raises: as :func:`~paceline.replica.capture.capture.capture`.
    """
    operators = strategy.tensor_parallel
    if not operators and is_sequential(module):
        units = group(capture(module, inputs, training=training))
        inside = dict(module.named_modules()).keys() - units.modules().keys()
        if inside.isdisjoint(strategy.cuts):
            return units
        operators = True
    return group(capture(module, inputs, operators=operators, training=training, others=others, verified=verified))


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
