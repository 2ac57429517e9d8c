"""Measure the actions of a pipeline's workers, each on one rank, with inputs from other stages at hand."""

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.core.types import Seconds
from paceline.engine.base import Job
from paceline.engine.run_context import RunContext, first_batch
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import CollectiveCall, FakeShards
from paceline.engine.step_profile.compute import Pass, RankProfile, synchronized_repeats
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.module_utils import preserve_tensors, tensors_of
from paceline.replica.pipeline.comm_plan import CommPlan, PipelineContext, ScheduledAction
from paceline.replica.pipeline.cut import Cut, Part
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches
from paceline.replica.pipeline.p2p_queue import Received
from paceline.replica.pipeline.prepare import part_dependencies, prepare_cut, run_parts
from paceline.replica.pipeline.stage_runtime import StageRuntime, merged_module
from paceline.replica.tensor.placements import Placement, shard_layout

# Factor from an output to the made-up gradient that comes back for it; no optimizer steps on it.
SMALL = 1e-4

# (part, kind of action).
Key: TypeAlias = tuple[int, str]

# (crossing, micro-batch) -> the value that one part sends another.
Values: TypeAlias = Mapping[tuple[str, int], Received]


def profile_stages(setup: RunContext, context: RankContext) -> Sequence[RankProfile]:
    """Measure all workers of a replica, each on one of the ranks, as many at a time as there are ranks."""
    workers, size = setup.job.strategy.mesh.per_replica, context.world.size
    turns = range(-(-workers // size))
    return [_IsolatedWorker(setup.job, context, (n * size + context.world.rank) % workers).profile() for n in turns]


class _IsolatedWorker:
    """One worker of a pipeline, executed without the others."""

    def __init__(self, job: Job, context: RankContext, worker: int) -> None:
        program, strategy, mesh = job.program, job.strategy, job.strategy.mesh
        place, gather = mesh.coordinate(worker), context.gather
        self._context, self._fake = context, FakeShards(mesh.shard(place), mesh.shards(place.stage))
        batch, module = first_batch(job), program.build()
        cut = prepare_cut(program, strategy, module, batch, lambda choose: gather(choose(), "the cut")[0]).cut
        self._needs = part_dependencies(program, cut, module, batch)
        of_batch = micro_batches(batch, strategy.micro_batch_count, cut.captured.flatten)
        self._cut, self._values = cut, _crossing_values(cut, module, of_batch)
        self._gradients = {
            key: sent.value * SMALL
            for key, sent in self._values.items()
            if isinstance(sent.value, Tensor) and sent.differentiable
        }
        # The values are computed first: from here on the parts' modules are changed in place.
        whole = FlatLayout.of(module, job.running_buffers)
        parts, placements = self._parts(job, cut, module, place.stage, of_batch[0].inputs)
        layout = shard_layout(whole.part(tensors_of(merged_module(parts)).keys()), placements, self._fake.rank)
        plan = CommPlan.of(cut, strategy.order, mesh.stage_replicas, strategy.micro_batch_count)
        number = mesh.stage_replicas.number(mesh.stage_replica(place))
        means: dict[str, Any] = {"recompute": strategy.recompute, "batchnorm": strategy.batchnorm}
        pipeline = PipelineContext(program, plan, cut.captured, parts, layout, number, **means)
        self._runtime = StageRuntime(pipeline)
        self._state = read(merged_module(parts), layout.new())
        self._share = layout.parameter_bytes / max(1, whole.parameter_bytes)
        self._micro_batches = self._runtime.micro_batches(batch, batch.samples, 0)
        self._tasks = plan.worker_program(number, len(self._micro_batches)).actions

    def _parts(
        self, job: Job, cut: Cut, module: nn.Module, own_stage: int, leaves: Sequence[Tensor]
    ) -> tuple[list[Part], Mapping[str, Placement]]:
        """Return this worker's parts, rewritten as its shard where there are several, and its tensors' placements."""
        strategy = job.strategy
        stages = [strategy.order.worker_of(part.number, strategy.stage_count) for part in cut.parts]
        numbers = [number for number, stage in enumerate(stages) if stage == own_stage]
        if not strategy.tensor_parallel:
            return [cut.parts[number] for number in numbers], {}
        counts = [strategy.mesh.shards(stage) for stage in stages]
        own = {number: self._fake for number in numbers if counts[number] > 1}
        request = ShardingRequest(job.program, cut, module, leaves, counts, strategy.shard_rules)
        made = shard_parts(request, own, self._context.gather, checked=False)
        return [made.parts[n] for n in numbers], {
            name: how for n in numbers for name, how in made.placements[n].items()
        }

    def profile(self) -> RankProfile:
        """Measure its actions in each pass that counts."""
        times, calls = defaultdict[Key, list[Seconds]](list), dict[Key, Sequence[CollectiveCall]]()
        passes, tensors = list[Pass](), self._runtime.tensors
        local, out = self._state.clone(), self._state.layout.new()
        for number in synchronized_repeats(self._context):
            began = time.perf_counter()
            tensors.bind(local.copy_(self._state))
            pull = time.perf_counter() - began
            taken = defaultdict[Key, list[Seconds]](list)
            for task, following in zip_longest(self._tasks, self._tasks[1:]):
                self._fake.begin()
                self._execute(task, following)
                key = task.action.stage, task.action.kind
                taken[key].append(sum(self._fake.segments()))
                calls[key] = self._fake.calls
            for stage in self._runtime.stages.values():
                stage.end_mini_batch()
            began = time.perf_counter()
            torch._foreach_copy_(out.views.parameters, tensors.take_gradients())
            local.copy_(out)  # to the memory where all parts of a Δ are
            if number >= 0:
                passes.append(Pass(pull, (), time.perf_counter() - began))
                for key, each in taken.items():  # micro-batches differ by a sample at most: their mean is one's time
                    times[key].append(statistics.fmean(each))
        sent_bytes = defaultdict[tuple[int, int], list[int]](list)
        for crossing in (each for part in self._cut.parts for each in part.sent):
            value = self._values[crossing.name, 0].value
            if isinstance(value, Tensor):
                for consumer in crossing.consumers:
                    sent_bytes[crossing.source, consumer].append(value.nbytes)
        measured: dict[str, Any] = {"stages": times, "stage_calls": calls, "sent_bytes": sent_bytes}
        return RankProfile(passes, **measured, needs=self._needs, steps_on=self._share)

    def _execute(self, task: ScheduledAction, following: ScheduledAction | None) -> None:
        part, index = task.action.stage, task.action.micro_batch
        stage, micro_batch = self._runtime.stages[part], self._micro_batches[index]
        if task.action.kind == "forward":
            turns = following is not None and (part, index) == (following.action.stage, following.action.micro_batch)
            received = [self._values[crossing.name, index] for crossing in self._cut.parts[part].received]
            stage.forward(micro_batch, received, backward_follows=turns)
        elif task.action.kind == "backward_weight":
            stage.backward_weight(micro_batch)
        else:
            stage.recompute(micro_batch)
            split, outputs = task.action.kind == "backward_input", stage.differentiable_outputs(micro_batch)
            gradients = {name: self._gradients[name, index] for name in outputs}
            # no stage before this one waits for the gradients of its inputs
            stage.backward(micro_batch, gradients, task.sends, lambda *_: 0, split=split)


def _crossing_values(cut: Cut, module: nn.Module, micro_batches: Sequence[MicroBatch]) -> Values:
    """Return what parts send each other for each micro-batch, as the whole model computes it."""
    values = dict[tuple[str, int], Received]()
    with preserve_tensors(module):
        for micro_batch in micro_batches:
            for run in run_parts(cut, micro_batch.inputs):
                for crossing, value in zip(run.part.sent, run.outputs, strict=False):
                    tensor = isinstance(value, Tensor)
                    sent = Received(value.detach(), value.requires_grad) if tensor else Received(value, False)
                    values[crossing.name, micro_batch.index] = sent
    return values
