"""One worker's part of a forward pass: a shard's, or that of a stage, or of a shard of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.aggregation import Synchronous
from paceline.engine.team.circles import Circles
from paceline.engine.team.leisure import excused
from paceline.engine.team.routes import Routes
from paceline.engine.team.shards import GroupShards
from paceline.engine.team.team import Team
from paceline.engine.team.wire import GroupWire
from paceline.inference.question import Answer, Question
from paceline.replica.base import Batch
from paceline.replica.capture import capture
from paceline.replica.forms import batch_size
from paceline.replica.hybrid.division import divided
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.costs import measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.loss import rows
from paceline.replica.pipeline.mail import Mail
from paceline.replica.pipeline.messages import Plan, Task
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches, sizes
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.preparation import boundaries
from paceline.replica.pipeline.rehearsal import check_cut
from paceline.replica.pipeline.units import group
from paceline.replica.tensor.preparation import agree, agreed_times, planned_graph
from paceline.replica.tensor.rehearsal import check_shard
from paceline.replica.tensor.rewrite import rewritten


def answer(question: Question, team: Team) -> Answer:
    """What this rank has of the output; all ranks of the team call it together.

    Raises:
        InputError: the model can't be captured, cut or divided as the strategy says.
    """
    with torch.random.fork_rng(devices=[]), question.program.autocast("cpu"):
        if question.strategy.pipelined:
            return _Stages(question, team).answer()
        return _by_shards(question, team)


def _by_shards(question: Question, team: Team) -> Answer:
    strategy, module, inputs = question.strategy, question.model(), question.inputs
    traffic = Circles.of(strategy.mesh, team.traffic).shards
    assert traffic is not None, "one worker answers by itself"
    shards = GroupShards(traffic, team.world.rank)
    with excused(team):
        captured = capture(module, inputs, operators=True, training=False)
        leaves = captured.flat(inputs)
        times = agreed_times(captured, leaves, team.gather)
        made = planned_graph(captured, leaves, shards.count, strategy.shard_rules, times, type(module).__name__)
        agree(made, team.gather)
        shard = rewritten(made, shards)
        check_shard(shard, captured, module, inputs, shards, training=False)
    with torch.no_grad():
        output = shard.module(*leaves)
    return Answer({0: output} if team.world.rank == 0 else {}, captured.output)


class _Stages:
    """One worker of a pipeline, which goes through forward passes alone."""

    def __init__(self, question: Question, team: Team) -> None:
        self._question, self._team = question, team
        # Without backward every schedule is the same, and what is kept for it takes no memory.
        plain: dict[str, Any] = {"schedule": "gpipe", "aggregation": Synchronous(), "stage_memory_bytes": None}
        self._strategy = replace(question.strategy, **plain)
        self._mesh, self._place = self._strategy.mesh, self._strategy.mesh.place(team.world.rank)
        among = Circles.of(self._mesh, team.traffic).shards
        self._shards = None if among is None else GroupShards(among, self._mesh.shard(self._place))

    def answer(self) -> Answer:
        question, strategy = self._question, self._strategy
        samples, count = batch_size(question.inputs), strategy.micro_batch_count
        with excused(self._team):
            first = rows(question.inputs, samples, slice(sizes(samples, count)[0]))
            made = self._cut(question.model(), first)
        batch = Batch(question.inputs, (), samples)
        given = micro_batches(batch, count, made.captured.flat)
        with torch.no_grad():
            outputs = self._through(made, given)
        return Answer(outputs if self._mesh.shard(self._place) == 0 else {}, made.captured.output)

    def _cut(self, module: nn.Module, first: Any) -> Cut:
        """The model's parts, those of this rank rewritten as its shards."""
        strategy = self._strategy
        captured = capture(module, first, operators=strategy.tensor_parallel, training=False)
        units, leaves = group(captured), captured.flat(first)
        mine: Boundaries = ()
        if self._team.world.rank == 0:
            mine = boundaries(self._question.program, strategy, module, units, measure(units, leaves))
        made = cut(units, self._team.gather(mine, "where the model is cut")[0])
        check_cut(made, module, first)
        if not strategy.tensor_parallel:
            return made
        counts = [self._mesh.shards(part.number) for part in made.parts]
        own = {} if self._shards is None else {self._place.stage: self._shards}
        says = self._team.gather
        division = divided(self._question.program, made, module, leaves, counts, own, says, strategy.shard_rules)
        return replace(made, parts=division.parts)

    def _through(self, made: Cut, given: Sequence[MicroBatch]) -> Mapping[int, Sequence[Any]]:
        """All micro-batches through this worker's part; of the last part, the output."""
        strategy, team, part = self._strategy, self._team, made.parts[self._place.stage]
        assert team.traffic is not None, "one worker answers by itself"
        steps = Plan.of(made, strategy.order, strategy.stage_count, strategy.micro_batch_count, strategy.copies)
        way = steps.itinerary(self._mesh.columns.number(self._mesh.column(self._place)), len(given))
        mail = Mail(GroupWire(team.traffic, Routes(self._mesh, self._place)))
        mail.begin([m for m in way.incoming if not m.gradient], [each.shapes for each in given])
        part.module.eval()
        found: dict[int, Sequence[Any]] = {}
        for task in way.tasks:
            if task.action.kind == "forward":
                index = task.action.micro_batch
                found[index] = _forward(part, task, given[index], mail)
        mail.settle()
        return found if part.number == len(made.parts) - 1 else {}


def _forward(part: Part, task: Task, given: MicroBatch, mail: Mail) -> Sequence[Any]:
    """One micro-batch through a part; the leaves of the output, where it is the last."""
    values = [mail.take(message).value for message in task.needs]
    made = part.module(*(given.inputs[leaf] for leaf in part.inputs), *values)
    named = dict(zip((crossing.name for crossing in part.sent), made, strict=False))
    for message in task.gives:
        value = named[message.name]
        mail.send(message, value.contiguous() if isinstance(value, Tensor) else value, differentiable=False)
    rest: Sequence[Any] = made[len(part.sent) :]
    return rest
