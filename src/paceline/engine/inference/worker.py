"""What is asked of a model, and its answer in pieces.

One worker's part of a forward pass: a shard's, or that of a stage, or of a shard of a stage.
"""

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
from paceline.engine.spmd.rank_context import RankContext, SubGroups, extended_timeout
from paceline.engine.spmd.shared_model import build_once_per_host
from paceline.engine.spmd.tensor_parallel_rank import GroupShards
from paceline.program import Program, Tree
from paceline.replica.base import Batch
from paceline.replica.capture.capture import Captured, capture
from paceline.replica.capture.input_spec import Rebuild, batch_size
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.module_utils import materialize
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.comm_plan import CommPlan, ScheduledAction, WorkerProgram
from paceline.replica.pipeline.costs import measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batch_sizes, micro_batches
from paceline.replica.pipeline.p2p_queue import P2PQueue
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.prepare import capture_units, check_cut, choose_boundaries, select_rows
from paceline.replica.tensor.prepare import agreed_op_times, check_same_plan, check_shard, plan_captured
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.safe_files import State
from paceline.strategy import Strategy

Pieces: TypeAlias = Mapping[int, Sequence[Any]]
"""Micro-batch -> the leaves of the output for it."""


@dataclass(frozen=True)
class InferenceRequest:
    """What is asked of all workers, but for the inputs."""

    program: Program
    strategy: Strategy
    state: State | None
    """Parameters and buffers by full name; None: A_0."""
    timeout_s: Seconds

    def model(self, spill: SpillAllocator | None = None) -> nn.Module:
        """With the state that is asked for, in evaluation mode.

        Args:
            spill: where it may lie; None: in ordinary memory.
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
    """What one worker has of the output."""

    pieces: Pieces
    """Of a worker that has none of it: empty."""
    rebuild: Rebuild
    """The leaves of an output -> the output."""


def together(answers: Sequence[Answer], samples: int, micro_batches: int) -> Tree:
    """The whole output.

    Raises:
        InputError: an output that has not a row for each sample was made of several micro-batches.
    """
    pieces = {index: leaves for answer in answers for index, leaves in answer.pieces.items()}
    sizes = micro_batch_sizes(samples, micro_batches)
    return answers[0].rebuild(
        [_joined(each, sizes) for each in zip(*(pieces[i] for i in range(len(sizes))), strict=True)]
    )


def _joined(leaf: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One leaf of the output, of which each micro-batch has made its rows."""
    if len(leaf) == 1:
        return leaf[0]
    tensors = [each for each in leaf if isinstance(each, Tensor) and each.dim()]
    if [len(each) for each in tensors] == list(sizes):
        return torch.cat(tensors)
    if all(_same(each, leaf[0]) for each in leaf):
        return leaf[0]
    raise InputError(
        f"the output of micro-batches of {list(sizes)} samples has shapes {[list(each.shape) for each in tensors]}, "
        "which are no rows of samples; write micro_batches=1"
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


class InferenceWorker:
    """One rank's model, asked again and again; all ranks of the team are asked the same together.

    The model is captured, cut and divided for the first inputs, and anew for inputs of another form.
    """

    def __init__(self, question: InferenceRequest, context: RankContext) -> None:
        self._question, self._context = question, context
        self._make = _Stages if question.strategy.pipelined else _Shards
        self._made: list[_Stages | _Shards] = []

    def __call__(self, inputs: Tree) -> Answer:
        """What this rank has of the output.

        Raises:
            InputError: the model can't be captured, cut or divided as the strategy says.
        """
        with torch.random.fork_rng(devices=[]), self._question.program.autocast("cpu"):
            made = next((each for each in self._made if each.takes(inputs)), None)
            if made is None:
                with build_once_per_host(self._question.model, self._context) as module:
                    made = self._make(self._question, self._context, module, inputs)
                self._made.append(made)
            with torch.no_grad():
                return made.answer(inputs)


def _fits(captured: Captured, inputs: Tree) -> bool:
    try:
        captured.flatten(inputs)
    except InputError:
        return False
    return True


class _Shards:
    """One worker's shard of the whole model."""

    def __init__(self, question: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree) -> None:
        strategy = question.strategy
        communicator = SubGroups.of(strategy.mesh, context.communicator).shards
        assert communicator is not None, "one worker answers by itself"
        shards = GroupShards(communicator, context.world.rank)
        self._first = context.world.rank == 0
        with extended_timeout(context):
            self._captured = capture(module, inputs, operators=True, training=False)
            leaves = self._captured.flatten(inputs)
            times = agreed_op_times(self._captured, leaves, context.gather)
            name = type(module).__name__
            made = plan_captured(self._captured, leaves, shards.count, strategy.shard_rules, times, name)
            check_same_plan(made, context.gather)
            self._shard = rewrite_for_shard(made, shards)
            check_shard(self._shard, self._captured, module, inputs, shards, training=False)

    def takes(self, inputs: Tree) -> bool:
        """Whether it was captured for inputs of this form."""
        return _fits(self._captured, inputs)

    def answer(self, inputs: Tree) -> Answer:
        """The whole output, on the first rank."""
        output = self._shard.module(*self._captured.flatten(inputs))
        return Answer({0: output} if self._first else {}, self._captured.rebuild)


class _Stages:
    """One worker of a pipeline, which goes through forward passes alone."""

    def __init__(self, question: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree) -> None:
        self._question, self._context = question, context
        # Without backward every schedule is the same, and what is kept for it takes no memory.
        plain: dict[str, Any] = {"schedule": "gpipe", "aggregation": Synchronous(), "stage_memory_bytes": None}
        strategy = self._strategy = replace(question.strategy, **plain)
        self._mesh, self._place = strategy.mesh, strategy.mesh.place(context.world.rank)
        among = SubGroups.of(self._mesh, context.communicator).shards
        self._shards = None if among is None else GroupShards(among, self._mesh.shard(self._place))
        samples, count = batch_size(inputs), strategy.micro_batch_count
        with extended_timeout(context):
            self._made = self._cut(module, select_rows(inputs, samples, slice(micro_batch_sizes(samples, count)[0])))
        assert context.communicator is not None, "one worker answers by itself"
        self._plan = CommPlan.of(self._made, strategy.order, strategy.stage_count, count, strategy.copies)
        self._mail = P2PQueue(ProcessGroupP2P(context.communicator, Routes(self._mesh, self._place)))
        self._part = self._made.parts[self._place.stage]
        self._part.module.eval()
        self._ways: dict[int, WorkerProgram] = {}

    def takes(self, inputs: Tree) -> bool:
        """Whether it was captured for inputs of this form."""
        return _fits(self._made.captured, inputs)

    def answer(self, inputs: Tree) -> Answer:
        """The last stage's outputs, on its first shards."""
        batch, count = Batch(inputs, (), batch_size(inputs)), self._strategy.micro_batch_count
        outputs = self._through(micro_batches(batch, count, self._made.captured.flatten))
        return Answer(outputs if self._mesh.shard(self._place) == 0 else {}, self._made.captured.rebuild)

    def _cut(self, module: nn.Module, first: Any) -> Cut:
        """The model's parts, those of this rank rewritten as its shards."""
        strategy = self._strategy
        units = capture_units(strategy, module, first, training=False)
        leaves = units.captured.flatten(first)
        mine: Boundaries = ()
        if self._context.world.rank == 0:
            mine = choose_boundaries(self._question.program, strategy, module, units, measure(units, leaves))
        made = cut(units, self._context.gather(mine, "where the model is cut")[0])
        check_cut(made, module, first)
        if not strategy.tensor_parallel:
            return made
        counts = [self._mesh.shards(part.number) for part in made.parts]
        own = {} if self._shards is None else {self._place.stage: self._shards}
        says = self._context.gather
        request = ShardingRequest(self._question.program, made, module, leaves, counts, strategy.shard_rules)
        division = shard_parts(request, own, says)
        return replace(made, parts=division.parts)

    def _way(self, count: int) -> WorkerProgram:
        """Through so many micro-batches."""
        if count not in self._ways:
            worker = self._mesh.columns.number(self._mesh.column(self._place))
            self._ways[count] = self._plan.worker_program(worker, count)
        return self._ways[count]

    def _through(self, given: Sequence[MicroBatch]) -> Mapping[int, Sequence[Any]]:
        """All micro-batches through this worker's part; of the last part, the output."""
        way, mail = self._way(len(given)), self._mail
        mail.begin([m for m in way.incoming if not m.gradient], [each.shapes for each in given])
        found: dict[int, Sequence[Any]] = {}
        for task in way.actions:
            if task.action.kind == "forward":
                index = task.action.micro_batch
                found[index] = _forward(self._part, task, given[index], mail)
        mail.wait_sends()
        return found if self._part.number == len(self._made.parts) - 1 else {}


def _forward(part: Part, task: ScheduledAction, given: MicroBatch, mail: P2PQueue) -> Sequence[Any]:
    """One micro-batch through a part; the leaves of the output, where it is the last."""
    values = [mail.receive(message).value for message in task.receives]
    made = part.module(*(given.inputs[leaf] for leaf in part.inputs), *values)
    named = dict(zip((crossing.name for crossing in part.sent), made, strict=False))
    for message in task.sends:
        value = named[message.name]
        mail.send(message, value.contiguous() if isinstance(value, Tensor) else value, differentiable=False)
    rest: Sequence[Any] = made[len(part.sent) :]
    return rest
