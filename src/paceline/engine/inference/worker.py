"""One rank's part of a forward pass: of a shard, of a stage, or of a shard of a stage; and the request it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.aggregation import Synchronous
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import RankContext, SubGroups, build_once_per_host, extended_timeout
from paceline.engine.spmd.tensor_parallel_rank import ProcessGroupTP
from paceline.program import Program, Tree
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.input_spec import Rebuild, batch_size
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.module_utils import materialize
from paceline.replica.pipeline.comm_plan import CommPlan, ScheduledAction
from paceline.replica.pipeline.costs import measure
from paceline.replica.pipeline.cut import Cut, cut
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batch_sizes, micro_batches
from paceline.replica.pipeline.p2p_queue import P2PQueue
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.prepare import capture_units, check_cut, choose_boundaries, select_rows
from paceline.replica.tensor.prepare import agreed_op_times, check_same_plan, plan_captured
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.shard_check import check_shard
from paceline.strategy import Strategy

Pieces: TypeAlias = Mapping[int, Sequence[Any]]
"""Micro-batch -> the leaves of its output."""


@dataclass(frozen=True)
class InferenceRequest:
    """The model and strategy of a predictor, the same for all workers."""

    program: Program
    strategy: Strategy
    state: Mapping[str, Tensor] | None
    """Parameters and buffers by full name; None: A_0."""
    timeout_s: Seconds

    def model(self, spill: SpillAllocator | None = None) -> nn.Module:
        """Build the model with the requested state, in evaluation mode.

        Args:
            spill: allocates its memory; None: ordinary memory.
        """
        module = self.program.build() if spill is None else materialize(self.program, spill)
        if self.state is not None:
            try:
                module.load_state_dict(dict(self.state))
            except RuntimeError as error:
                raise InputError(f"state does not fit the program's model: {error}") from error
        return module.eval()


@dataclass(frozen=True)
class Answer:
    """One rank's part of the output."""

    pieces: Pieces
    """Its pieces; empty on a rank that has none."""
    rebuild: Rebuild
    """Function from the leaves of an output to the output."""


def join_answers(answers: Sequence[Answer], samples: int, micro_batches: int) -> Tree:
    """Return the whole output.

    Raises:
        InputError: an output that has not a row for each sample was made of several micro-batches.
    """
    pieces = {index: leaves for answer in answers for index, leaves in answer.pieces.items()}
    rows = micro_batch_sizes(samples, micro_batches)
    return answers[0].rebuild(
        [_join_leaf(each, rows) for each in zip(*(pieces[i] for i in range(len(rows))), strict=True)]
    )


def _join_leaf(pieces: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join one leaf of the output, of which each micro-batch has made its rows."""
    first, rest = pieces[0], pieces[1:]
    if not rest:
        return first
    tensors = [piece for piece in pieces if isinstance(piece, Tensor) and piece.dim()]
    if [len(tensor) for tensor in tensors] == list(rows):
        return torch.cat(tensors)
    if isinstance(first, Tensor):
        same = all(isinstance(piece, Tensor) and torch.equal(piece, first) for piece in rest)
    else:
        same = all(bool(piece == first) for piece in rest)
    if same:
        return first
    raise InputError(
        f"the output of micro-batches of {list(rows)} samples has shapes {[list(each.shape) for each in tensors]}, "
        "which are no rows of samples; write micro_batches=1"
    )


class InferenceWorker:
    """One rank's model; all ranks of a predictor are called with the same inputs together.

    The model is captured, cut and divided for the first inputs, and again for inputs of another form.
    """

    def __init__(self, request: InferenceRequest, context: RankContext) -> None:
        self._request, self._context = request, context
        self._models: list[_StageModel | _ShardModel] = []

    def __call__(self, inputs: Tree) -> Answer:
        """Return this rank's part of the output.

        Raises:
            InputError: the model can't be captured, cut or divided as the strategy says.
        """
        with torch.random.fork_rng(devices=[]), self._request.program.autocast("cpu"):
            model = next((each for each in self._models if _takes(each.captured, inputs)), None)
            if model is None:
                kind = _StageModel if self._request.strategy.pipelined else _ShardModel
                with build_once_per_host(self._request.model, self._context) as module:
                    model = kind(self._request, self._context, module, inputs)
                self._models.append(model)
            with torch.no_grad():
                return model.answer(inputs)


def _takes(captured: Captured, inputs: Tree) -> bool:
    """Return whether a model was captured for inputs of this form."""
    try:
        captured.flatten(inputs)
    except InputError:
        return False
    return True


class _ShardModel:
    """One worker's shard of the whole model."""

    def __init__(self, request: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree) -> None:
        strategy = request.strategy
        communicator = SubGroups.of(strategy.mesh, context.communicator).shards
        assert communicator is not None, "one worker answers by itself"
        shards = ProcessGroupTP(communicator, context.world.rank)
        self._first = context.world.rank == 0
        with extended_timeout(context):
            self.captured = capture(module, inputs, operators=True, training=False)
            leaves = self.captured.flatten(inputs)
            times = agreed_op_times(self.captured, leaves, context.gather)
            name = type(module).__name__
            made = plan_captured(self.captured, leaves, shards.count, strategy.shard_rules, times, name)
            check_same_plan(made, context.gather)
            self._shard = rewrite_for_shard(made, shards)
            check_shard(self._shard, self.captured, module, inputs, shards, training=False)

    def answer(self, inputs: Tree) -> Answer:
        """Return the whole output, on the first rank."""
        output = self._shard.module(*self.captured.flatten(inputs))
        return Answer({0: output} if self._first else {}, self.captured.rebuild)


class _StageModel:
    """One worker of a pipeline that makes forward passes only."""

    def __init__(self, request: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree) -> None:
        self._request, self._context = request, context
        # Without backward every schedule is the same, and no activation is kept.
        plain: dict[str, Any] = {"schedule": "gpipe", "aggregation": Synchronous(), "stage_memory_bytes": None}
        strategy = self._strategy = replace(request.strategy, **plain)
        self._mesh, self._place = strategy.mesh, strategy.mesh.coordinate(context.world.rank)
        communicator = SubGroups.of(self._mesh, context.communicator).shards
        self._shards = None if communicator is None else ProcessGroupTP(communicator, self._mesh.shard(self._place))
        samples, count = batch_size(inputs), strategy.micro_batch_count
        with extended_timeout(context):
            made = self._cut(module, select_rows(inputs, samples, slice(micro_batch_sizes(samples, count)[0])))
        assert context.communicator is not None, "one worker answers by itself"
        self.captured = made.captured
        self._plan = CommPlan.of(made, strategy.order, self._mesh.stage_replicas, count)
        self._queue = P2PQueue(ProcessGroupP2P(context.communicator, Routes(self._mesh, self._place)))
        self._part, self._is_last = made.parts[self._place.stage], self._place.stage == len(made.parts) - 1
        self._part.module.eval()
        self._worker = self._mesh.stage_replicas.number(self._mesh.stage_replica(self._place))

    def answer(self, inputs: Tree) -> Answer:
        """Run all micro-batches through this worker's part; return the last stage's outputs, on its first shard."""
        batch, count = Batch(inputs, (), batch_size(inputs)), self._strategy.micro_batch_count
        chunks = micro_batches(batch, count, self.captured.flatten)
        program, queue = self._plan.worker_program(self._worker, len(chunks)), self._queue
        queue.begin([m for m in program.incoming if not m.gradient], [chunk.shapes for chunk in chunks])
        outputs: dict[int, Sequence[Any]] = {}
        for action in program.actions:
            if action.action.kind == "forward":
                index = action.action.micro_batch
                outputs[index] = self._forward(action, chunks[index])
        queue.wait_sends()
        sends_output = self._is_last and self._mesh.shard(self._place) == 0
        return Answer(outputs if sends_output else {}, self.captured.rebuild)

    def _forward(self, action: ScheduledAction, chunk: MicroBatch) -> Sequence[Any]:
        """Run one micro-batch through the part; return the leaves of the output if it is the last part."""
        part, queue = self._part, self._queue
        received = [queue.receive(message).value for message in action.receives]
        results = part.module(*(chunk.inputs[leaf] for leaf in part.inputs), *received)
        named = dict(zip((crossing.name for crossing in part.sent), results, strict=False))
        for message in action.sends:
            value = named[message.name]
            queue.send(message, value.contiguous() if isinstance(value, Tensor) else value, differentiable=False)
        output: Sequence[Any] = results[len(part.sent) :]
        return output

    def _cut(self, module: nn.Module, first: Any) -> Cut:
        """Cut the model; the parts of this rank are rewritten as its shards."""
        strategy, program, gather = self._strategy, self._request.program, self._context.gather
        units = capture_units(strategy, module, first, training=False)
        leaves = units.captured.flatten(first)
        local: Boundaries = ()
        if self._context.world.rank == 0:  # costs are measured, so the ranks' own would differ
            local = choose_boundaries(program, strategy, module, units, measure(units, leaves))
        made = cut(units, gather(local, "where the model is cut")[0])
        check_cut(made, module, first)
        if not strategy.tensor_parallel:
            return made
        counts = [self._mesh.shards(part.number) for part in made.parts]
        own = {} if self._shards is None else {self._place.stage: self._shards}
        request = ShardingRequest(program, made, module, leaves, counts, strategy.shard_rules)
        return replace(made, parts=shard_parts(request, own, gather).parts)
