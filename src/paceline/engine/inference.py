"""The forward pass alone: predictors of a model, and the workers of one replica that compute its output.

::

    in this process      model(inputs)
    on this host         inputs -- a pool of processes --> each rank's shard, stage, or shard of a stage -- pieces -->
    under torchrun       every rank is called with the same inputs; pieces are gathered, so each has the whole output
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.aggregation import Synchronous
from paceline.comm.fork_server import ForkServer
from paceline.comm.shared_memory import SpillAllocator
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.device import of_worker, placed, use
from paceline.engine.run_context import own_settings, threads
from paceline.engine.spmd.launch_env import LaunchEnv, backend_for
from paceline.engine.spmd.launcher import PRELOAD, WorkerPool
from paceline.engine.spmd.p2p import ProcessGroupP2P, Routes
from paceline.engine.spmd.rank_context import (
    RankContext,
    SubGroups,
    build_once_per_host,
    extended_timeout,
    open_rank_context,
)
from paceline.engine.spmd.tensor_parallel_rank import ProcessGroupTP
from paceline.program import Program, Tree, call, leaves, map_tree, on_device
from paceline.replica.base import Batch
from paceline.replica.capture.capture import capture
from paceline.replica.capture.input_spec import Rebuild, batch_size
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.module_utils import materialize
from paceline.replica.pipeline.comm_plan import CommPlan, ScheduledAction
from paceline.replica.pipeline.costs import measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batch_sizes, micro_batches, select_rows
from paceline.replica.pipeline.p2p_queue import P2PQueue
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.prepare import capture_units, check_cut, choose_boundaries
from paceline.replica.tensor.prepare import agreed_op_times, check_same_plan, plan_captured
from paceline.replica.tensor.rewrite import rewrite_for_shard
from paceline.replica.tensor.shard_check import check_shard
from paceline.replica.tensor.shard_forward import ShardForward
from paceline.strategy import Strategy

# Computes the whole output for a batch.
Answering: TypeAlias = Callable[[Tree], Tree]


@dataclass(frozen=True)
class InferenceRequest:
    """The model and strategy of a predictor, the same for all workers; also the work of a pool of them."""

    program: Program
    strategy: Strategy
    state: Mapping[str, Tensor] | None
    """Parameters and buffers by full name; None: A_0."""
    timeout_s: Seconds
    divides: bool = False
    """Whether shards answer together even where one of them would be quicker."""

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

    def device(self, rank: int) -> torch.device:
        """Return the device that a rank computes on."""
        return of_worker(self.strategy.device, rank)

    def begin(self, context: RankContext) -> "InferenceWorker":
        """Return the worker of one rank of a pool."""
        return InferenceWorker(self, context)


@dataclass(frozen=True)
class Answer:
    """One rank's part of the output."""

    pieces: Mapping[int, Sequence[Any]]
    """Micro-batch -> the leaves of its output; empty on a rank that has none."""
    rebuild: Rebuild
    """Function from the leaves of an output to the output."""


# ----------------------------------------------------------------------------------------------------------- predictors


@final
class Predictor:
    """Computes a model's output at each call; context manager: its resources are released at the end of the block.

    Args:
        prepare: begins what answers inside the block, and releases it at the end.
    """

    def __init__(self, prepare: Callable[[], AbstractContextManager[Answering]]) -> None:
        self._prepare = prepare
        self._answering: Answering | None = None

    def __enter__(self) -> "Predictor":
        self._prepared = self._prepare()
        self._answering = self._prepared.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._answering = None
        self._prepared.__exit__(*raised)

    def __call__(self, inputs: Tree) -> Tree:
        """Return the whole output for a batch, on the CPU, without a graph.

        Args:
            inputs: as the model is called with them: a tensor, a tuple (``model(*inputs)``) or a dict
                (``model(**inputs)``), with at least one sample.

        Returns:
            The output, as the model returns it.

        Raises:
            InputError: what can't be done as written.
            WorkerError: the model failed in a worker, or a worker ended; the predictor can't be used any more.
        """
        refuse_inputs(inputs)
        if self._answering is None:
            raise InputError("a predictor answers inside its block; write with paceline.predictor(…) as ask: ask(x)")
        return self._answering(inputs)


@contextmanager
def in_process(request: InferenceRequest) -> Iterator[Answering]:
    """Context manager: predict in this process."""
    model, device = request.model(), request.device(0)
    placed(model, device=device)

    def answer(inputs: Tree) -> Tree:
        with own_settings(device.type), torch.no_grad(), request.program.autocast(str(device)):
            if request.strategy.threads is not None:
                torch.set_num_threads(request.strategy.threads)
            return on_host(call(model, on_device(inputs, device)))

    yield answer


@contextmanager
def on_this_host(request: InferenceRequest) -> Iterator[Answering]:
    """Context manager: predict in processes of this host, which are started."""
    workers = request.strategy.workers
    with (
        contextlib.closing(ForkServer.start((*PRELOAD, __name__))) as fork_server,
        WorkerPool(request, workers, threads(request.strategy), fork_server) as pool,
    ):
        yield lambda inputs: join_answers(pool.ask(inputs), request.strategy, inputs)


@contextmanager
def under_torchrun(request: InferenceRequest, backend: str | None) -> Iterator[Answering]:
    """Context manager: predict in the ranks that torchrun has started, each of which has the whole output.

    Args:
        request: model and strategy.
        backend: of the process group; None: the usual one for the device.
    """
    world = LaunchEnv.current()
    kind, device = request.strategy.device, str(request.device(world.rank))
    own_threads, chosen = threads(request.strategy, world.local_size), backend_for(kind, backend, world)
    with open_rank_context(world, chosen, device, request.timeout_s, watched=True) as context:
        worker = InferenceWorker(request, context)

        def answer(inputs: Tree) -> Tree:
            with own_settings(kind):
                torch.set_num_threads(own_threads)
                local = worker(inputs)
                answers = [replace(local, pieces=pieces) for pieces in context.gather(local.pieces, "the output")]
            return join_answers(answers, request.strategy, inputs)

        yield answer


def on_host(output: Tree) -> Tree:
    """Return an output with all of its tensors on the CPU."""
    return tree_map_only(Tensor, Tensor.cpu, output)


def refuse_inputs(inputs: Tree) -> None:
    """Raise InputError if there is no batch."""
    if not any(leaf.dim() for leaf in leaves(inputs)):
        raise InputError(f"inputs={inputs!r} has no tensor of samples; give a batch as the model is called with it")
    if not batch_size(inputs):
        raise InputError("inputs has no sample; give at least one")


def join_answers(answers: Sequence[Answer], strategy: Strategy, inputs: Tree) -> Tree:
    """Return the whole output of a batch.

    Raises:
        InputError: an output that has not a row for each sample was made of several micro-batches.
    """
    pieces = {index: part for answer in answers for index, part in answer.pieces.items()}
    rows = micro_batch_sizes(batch_size(inputs), strategy.micro_batch_count if strategy.pipelined else 1)
    by_leaf = zip(*(pieces[i] for i in range(len(rows))), strict=True)
    return answers[0].rebuild([_join_leaf(leaf, rows) for leaf in by_leaf])


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


# -------------------------------------------------------------------------------------------------------------- workers


class InferenceWorker:
    """One rank's model; all ranks of a predictor are called with the same inputs together.

    The model is captured, cut and divided for the first inputs, and again for inputs of another form; sizes in which
    these differ are left open then.
    """

    def __init__(self, request: InferenceRequest, context: RankContext) -> None:
        self._request, self._context = request, context
        self._device = request.device(context.world.rank)
        use(self._device)
        self._models: list[_StageModel | _ShardModel] = []
        self._captured_for: list[Tree] = []
        """Inputs of which there is a model, without their content."""

    def __call__(self, inputs: Tree) -> Answer:
        """Return this rank's part of the output.

        Raises:
            InputError: the model can't be captured, cut or divided as the strategy says.
        """
        request, context = self._request, self._context
        with torch.random.fork_rng(devices=[]), request.program.autocast("cpu"):
            for model in self._models:
                with contextlib.suppress(InputError):  # it was captured for inputs of another form
                    model.captured.flatten(inputs)
                    break
            else:
                kind = _StageModel if request.strategy.pipelined else _ShardModel
                with build_once_per_host(request.model, context) as module:
                    model = kind(request, context, module, inputs, self._captured_for)
                self._models.append(model)
                self._captured_for.append(map_tree(lambda t: t.to("meta"), inputs))
            with torch.no_grad(), request.program.autocast(str(self._device)):
                answer = model.answer(inputs)
        return replace(answer, pieces=on_host(answer.pieces))


class _ShardModel:
    """One worker's shard of the whole model."""

    def __init__(
        self, request: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree, others: Sequence[Tree]
    ) -> None:
        strategy = request.strategy
        communicator = SubGroups.of(strategy.mesh, context.communicator).shards
        assert communicator is not None, "one worker answers by itself"
        shards = ProcessGroupTP(communicator, context.world.rank)
        self._first = context.world.rank == 0
        with extended_timeout(context):
            self.captured = capture(module, inputs, operators=True, training=False, others=others)
            flat = self.captured.flatten(inputs)
            times = agreed_op_times(self.captured, flat, context.gather)
            name = type(module).__name__
            plan = plan_captured(self.captured, flat, shards.count, strategy.shard_rules, times, name)
            check_same_plan(plan, context.gather)
            shard = rewrite_for_shard(plan, shards)
            check_shard(shard, self.captured, module, inputs, shards, training=False)
        self._device = request.device(context.world.rank)
        placed(shard.module, device=self._device)
        # Rules are kept, parts of buffers that a pass writes stay alike, and a device may not hold the whole model.
        stays = strategy.shard_rules or any(call.mutates for call in plan.graph.calls.values())
        stays = stays or request.divides or self._device.type != "cpu"
        whole = None if stays else module
        self._forward = ShardForward(self.captured, shard, whole, context.gather, context.world.rank)

    def answer(self, inputs: Tree) -> Answer:
        """Return the whole output, on the first rank."""
        output = self._forward(on_device(inputs, self._device))
        return Answer({0: [output]} if self._first else {}, itemgetter(0))


class _StageModel:
    """One worker of a pipeline that makes forward passes only."""

    def __init__(
        self, request: InferenceRequest, context: RankContext, module: nn.Module, inputs: Tree, others: Sequence[Tree]
    ) -> None:
        # Without backward every schedule is the same, and no activation is kept.
        plain: dict[str, Any] = {"schedule": "gpipe", "aggregation": Synchronous(), "stage_memory_bytes": None}
        strategy, program = replace(request.strategy, **plain), request.program
        self._count, self._mesh = strategy.micro_batch_count, strategy.mesh
        place = self._mesh.coordinate(context.world.rank)
        assert context.communicator is not None, "one worker answers by itself"
        with extended_timeout(context):
            samples = batch_size(inputs)
            first = select_rows(inputs, samples, slice(micro_batch_sizes(samples, self._count)[0]))
            units = capture_units(strategy, module, first, others, training=False)
            flat = units.captured.flatten(first)
            local: Boundaries = ()
            if context.world.rank == 0:  # costs are measured, so the ranks' own would differ
                local = choose_boundaries(program, strategy, module, units, measure(units, flat))
            pieces = cut(units, context.gather(local, "where the model is cut")[0])
            check_cut(pieces, module, first)
            if strategy.tensor_parallel:
                group = SubGroups.of(self._mesh, context.communicator).shards
                own = {} if group is None else {place.stage: ProcessGroupTP(group, self._mesh.shard(place))}
                counts = [self._mesh.shards(part.number) for part in pieces.parts]
                sharding = ShardingRequest(program, pieces, module, flat, counts, strategy.shard_rules)
                pieces = replace(pieces, parts=shard_parts(sharding, own, context.gather).parts)
        self.captured = pieces.captured
        self._plan = CommPlan.of(pieces, strategy.order, self._mesh.stage_replicas, self._count)
        self._device = request.device(context.world.rank)
        self._queue = P2PQueue(ProcessGroupP2P(context.communicator, Routes(self._mesh, place), self._device))
        self._part = pieces.parts[place.stage]
        placed(self._part.module, device=self._device)
        self._part.module.eval()
        self._sends_output = place.stage == len(pieces.parts) - 1 and self._mesh.shard(place) == 0
        self._worker = self._mesh.stage_replicas.number(self._mesh.stage_replica(place))

    def answer(self, inputs: Tree) -> Answer:
        """Run all micro-batches through this worker's part; return the last stage's outputs, on its first shard."""
        chunks = micro_batches(Batch(inputs, (), batch_size(inputs)), self._count, self.captured.flatten)
        program, queue = self._plan.worker_program(self._worker, len(chunks)), self._queue
        queue.begin([m for m in program.incoming if not m.gradient], [chunk.shapes for chunk in chunks])
        outputs: dict[int, Sequence[Any]] = {}
        for action in program.actions:
            if action.action.kind == "forward":
                index = action.action.micro_batch
                chunk = chunks[index].to(str(self._device), self._part.inputs, target=False)
                outputs[index] = self._forward(action, chunk)
        queue.wait_sends()
        return Answer(outputs if self._sends_output else {}, self.captured.rebuild)

    def _forward(self, action: ScheduledAction, chunk: MicroBatch) -> Sequence[Any]:
        """Run one micro-batch through the part; return the leaves of the output if it is the last part."""
        part, queue = self._part, self._queue
        received = [queue.receive(message).value for message in action.receives]
        results = part.module(*(chunk.inputs[leaf] for leaf in part.inputs), *received)
        named = dict(zip((crossing.name for crossing in part.sent), results, strict=False))
        for message in action.sends:
            queue.send(message, named[message.name], differentiable=False)
        output: Sequence[Any] = results[len(part.sent) :]
        return output
