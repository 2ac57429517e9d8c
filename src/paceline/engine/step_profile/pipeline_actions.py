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
from paceline.engine.run_context import RunContext, first_batch
from paceline.engine.spmd.rank_context import RankContext
from paceline.engine.step_profile.comm import CollectiveCall, FakeShards
from paceline.engine.step_profile.compute import Pass, RankProfile, parameter_share, synchronized_repeats
from paceline.replica.flat_state import FlatLayout, read
from paceline.replica.hybrid import ShardingRequest, shard_parts
from paceline.replica.module_utils import preserve_tensors, tensors_of
from paceline.replica.pipeline.comm_plan import CommPlan, PipelineContext, ScheduledAction
from paceline.replica.pipeline.cut import Cut, Part
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches
from paceline.replica.pipeline.p2p_queue import Received
from paceline.replica.pipeline.prepare import part_dependencies, prepare_cut
from paceline.replica.pipeline.stage_runtime import StageRuntime, merged_module
from paceline.replica.tensor.placements import Placement, shard_layout

SMALL = 1e-4
"""Factor from an output to the made-up gradient that comes back for it; no optimizer steps on it."""

Key: TypeAlias = tuple[int, str]
"""(part, kind of action)."""


def profile_stages(setup: RunContext, context: RankContext) -> RankProfile:
    """Measure all workers of a replica, each on one of the ranks, as many at a time as there are ranks."""
    workers, size = setup.job.strategy.mesh.per_replica, context.world.size
    turns = -(-workers // size)
    profiles = [
        _IsolatedWorker(setup, context, (turn * size + context.world.rank) % workers).profile() for turn in range(turns)
    ]
    return RankProfile(
        [each for one in profiles for each in one.passes],
        stages={key: times for one in profiles for key, times in one.stages.items()},
        stage_calls={key: calls for one in profiles for key, calls in one.stage_calls.items()},
        sent_bytes=profiles[0].sent_bytes,
        needs=profiles[0].needs,
        steps_on=max(one.steps_on for one in profiles),
    )


class _IsolatedWorker:
    """One worker of a pipeline, executed without the others."""

    def __init__(self, setup: RunContext, context: RankContext, worker: int) -> None:
        self._setup, self._context, self._job = setup, context, setup.job
        strategy, mesh = self._job.strategy, self._job.strategy.mesh
        self._stage, column = mesh.coordinate(worker).stage, mesh.stage_replica(mesh.coordinate(worker))
        self._fake = FakeShards(mesh.shard(mesh.coordinate(worker)), mesh.shards(self._stage))
        self._batch, self._module = first_batch(self._job), self._job.program.build()
        gather = context.gather
        cut = prepare_cut(
            self._job.program, strategy, self._module, self._batch, lambda choose: gather(choose(), "the cut")[0]
        ).cut
        self._needs = part_dependencies(self._job.program, cut, self._module, self._batch)
        self._inputs = _StageInputs(cut, self._module, self._micro_batches(cut))
        whole = FlatLayout.of(self._module, self._job.running_buffers)
        parts, placements = self._parts(cut)
        layout = shard_layout(whole.part(tensors_of(merged_module(parts)).keys()), placements, self._fake.rank)
        plan = CommPlan.of(cut, strategy.order, mesh.stage_replicas, strategy.micro_batch_count)
        number = mesh.stage_replicas.number(column)
        means: dict[str, Any] = {"recompute": strategy.recompute, "batchnorm": strategy.batchnorm}
        self._place = StageRuntime(
            PipelineContext(self._job.program, plan, cut.captured, parts, layout, number, **means)
        )
        self._state, self._share = read(merged_module(parts), layout.new()), parameter_share(layout, whole)
        self._jobs = self._place.micro_batches(self._batch, self._batch.samples, 0)
        self._tasks = plan.worker_program(number, len(self._jobs)).actions

    def profile(self) -> RankProfile:
        """Measure its actions in each pass that counts."""
        times, calls = defaultdict[Key, list[Seconds]](list), dict[Key, Sequence[CollectiveCall]]()
        passes = list[Pass]()
        local, out = self._state.clone(), self._state.layout.new()
        for number in synchronized_repeats(self._context):
            began = time.perf_counter()
            self._place.tensors.bind(local.copy_(self._state))
            pull = time.perf_counter() - began
            taken = self._pass(calls)
            began = time.perf_counter()
            torch._foreach_copy_(out.views.parameters, self._place.tensors.take_gradients())
            local.copy_(out)  # to the memory where all parts of a Δ are
            if number >= 0:
                passes.append(Pass(pull, (), time.perf_counter() - began))
                for key, each in taken.items():
                    times[key].append(statistics.fmean(each))
        return RankProfile(
            passes,
            stages=times,
            stage_calls=calls,
            sent_bytes=self._inputs.sent_bytes,
            needs=self._needs,
            steps_on=self._share,
        )

    def _pass(self, calls: dict[Key, Sequence[CollectiveCall]]) -> Mapping[Key, list[Seconds]]:
        taken = defaultdict[Key, list[Seconds]](list)
        for task, following in zip_longest(self._tasks, self._tasks[1:]):
            self._fake.begin()
            self._do(task, following)
            key = task.action.stage, task.action.kind
            taken[key].append(sum(self._fake.segments()))
            calls[key] = self._fake.calls
        for stage in self._place.stages.values():
            stage.end_mini_batch()
        return taken

    def _do(self, task: ScheduledAction, following: ScheduledAction | None) -> None:
        part, index = task.action.stage, task.action.micro_batch
        stage, micro_batch = self._place.stages[part], self._jobs[index]
        if task.action.kind == "forward":
            turns = following is not None and (part, index) == (following.action.stage, following.action.micro_batch)
            stage.forward(micro_batch, self._inputs.of(part, index), backward_follows=turns)
        elif task.action.kind == "backward_weight":
            stage.backward_weight(micro_batch)
        else:
            stage.recompute(micro_batch)
            split = task.action.kind == "backward_input"
            gradients = {
                name: self._inputs.gradients[name, index] for name in stage.differentiable_outputs(micro_batch)
            }
            stage.backward(micro_batch, gradients, task.sends, lambda *_: 0, split=split)

    def _micro_batches(self, cut: Cut) -> list[MicroBatch]:
        return micro_batches(self._batch, self._job.strategy.micro_batch_count, cut.captured.flatten)

    def _parts(self, cut: Cut) -> tuple[list[Part], Mapping[str, Placement]]:
        """Return this worker's parts, rewritten as its shard where there are several, and its tensors' placements."""
        strategy, count = self._job.strategy, self._job.strategy.stage_count
        owners = [strategy.order.worker_of(part.number, count) for part in cut.parts]
        numbers = [number for number, stage in enumerate(owners) if stage == self._stage]
        if not strategy.tensor_parallel:
            return [cut.parts[number] for number in numbers], {}
        counts = [strategy.mesh.shards(stage) for stage in owners]
        own = {number: self._fake for number in numbers if counts[number] > 1}
        leaves, program, rules = self._micro_batches(cut)[0].inputs, self._job.program, strategy.shard_rules
        request = ShardingRequest(program, cut, self._module, leaves, counts, rules)
        made = shard_parts(request, own, self._context.gather, checked=False)
        return [made.parts[n] for n in numbers], {
            name: how for n in numbers for name, how in made.placements[n].items()
        }


class _StageInputs:
    """Messages between parts, of each micro-batch, as the whole model computes them."""

    def __init__(self, cut: Cut, module: nn.Module, micro_batches: Sequence[MicroBatch]) -> None:
        self._parts = cut.parts
        self._made: dict[tuple[str, int], Received] = {}
        with preserve_tensors(module):
            for each in micro_batches:
                for part in cut.parts:
                    self._run(part, each)
        self.gradients = {
            key: made.value * SMALL
            for key, made in self._made.items()
            if isinstance(made.value, Tensor) and made.differentiable
        }
        """(crossing, micro-batch) -> a made-up gradient of its shape."""

    @property
    def sent_bytes(self) -> Mapping[tuple[int, int], Sequence[int]]:
        """Return (sending part, receiving part) -> sizes of the messages of the first micro-batch."""
        first = {name: made.value for (name, index), made in self._made.items() if not index}
        sizes = defaultdict[tuple[int, int], list[int]](list)
        for crossing in (each for part in self._parts for each in part.sent):
            value = first[crossing.name]
            if isinstance(value, Tensor):
                for consumer in crossing.consumers:
                    sizes[crossing.source, consumer].append(value.nbytes)
        return dict(sizes)

    def of(self, part: int, index: int) -> list[Received]:
        """Return what a part receives for a micro-batch."""
        return [self._made[crossing.name, index] for crossing in self._parts[part].received]

    def _run(self, part: Part, micro_batch: MicroBatch) -> None:
        received = (made.value for made in self.of(part.number, micro_batch.index))
        made = part.module(*(micro_batch.inputs[leaf] for leaf in part.inputs), *map(_fresh, received))
        for crossing, value in zip(part.sent, made, strict=False):
            tensor = isinstance(value, Tensor)
            kept = Received(value.detach(), value.requires_grad) if tensor else Received(value, False)
            self._made[crossing.name, micro_batch.index] = kept


def _fresh(value: Any) -> Any:
    """Return a copy whose gradient can be computed, if it is differentiable."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.clone().requires_grad_()
    return value
