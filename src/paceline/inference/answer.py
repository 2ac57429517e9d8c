"""One worker's part of a forward pass: a shard's, or that of a stage, or of a shard of a stage."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.aggregation import Synchronous
from paceline.core.errors import InputError
from paceline.engine.team.circles import Circles
from paceline.engine.team.leisure import excused
from paceline.engine.team.origin import once_per_host
from paceline.engine.team.routes import Routes
from paceline.engine.team.shards import GroupShards
from paceline.engine.team.team import Team
from paceline.engine.team.wire import GroupWire
from paceline.inference.question import Answer, Question
from paceline.program import Tree
from paceline.replica.base import Batch
from paceline.replica.capture import Captured, capture
from paceline.replica.forms import batch_size
from paceline.replica.hybrid.division import divided
from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.pipeline.costs import measure
from paceline.replica.pipeline.cut import cut
from paceline.replica.pipeline.loss import rows
from paceline.replica.pipeline.mail import Mail
from paceline.replica.pipeline.messages import Itinerary, Plan, Task
from paceline.replica.pipeline.micro_batches import MicroBatch, micro_batches, sizes
from paceline.replica.pipeline.partition import Boundaries
from paceline.replica.pipeline.preparation import boundaries, units_of
from paceline.replica.pipeline.rehearsal import check_cut
from paceline.replica.tensor.preparation import agree, agreed_times, planned_graph
from paceline.replica.tensor.rehearsal import check_shard
from paceline.replica.tensor.rewrite import rewritten


class Asked:
    """One rank's model, asked again and again; all ranks of the team are asked the same together.

    The model is captured, cut and divided for the first inputs, and anew for inputs of another form.
    """

    def __init__(self, question: Question, team: Team) -> None:
        self._question, self._team = question, team
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
                with once_per_host(self._question.model, self._team) as module:
                    made = self._make(self._question, self._team, module, inputs)
                self._made.append(made)
            with torch.no_grad():
                return made.answer(inputs)


def _fits(captured: Captured, inputs: Tree) -> bool:
    try:
        captured.flat(inputs)
    except InputError:
        return False
    return True


class _Shards:
    """One worker's shard of the whole model."""

    def __init__(self, question: Question, team: Team, module: nn.Module, inputs: Tree) -> None:
        strategy = question.strategy
        traffic = Circles.of(strategy.mesh, team.traffic).shards
        assert traffic is not None, "one worker answers by itself"
        shards = GroupShards(traffic, team.world.rank)
        self._first = team.world.rank == 0
        with excused(team):
            self._captured = capture(module, inputs, operators=True, training=False)
            leaves = self._captured.flat(inputs)
            times = agreed_times(self._captured, leaves, team.gather)
            name = type(module).__name__
            made = planned_graph(self._captured, leaves, shards.count, strategy.shard_rules, times, name)
            agree(made, team.gather)
            self._shard = rewritten(made, shards)
            check_shard(self._shard, self._captured, module, inputs, shards, training=False)

    def takes(self, inputs: Tree) -> bool:
        """Whether it was captured for inputs of this form."""
        return _fits(self._captured, inputs)

    def answer(self, inputs: Tree) -> Answer:
        """The whole output, on the first rank."""
        output = self._shard.module(*self._captured.flat(inputs))
        return Answer({0: output} if self._first else {}, self._captured.output)


class _Stages:
    """One worker of a pipeline, which goes through forward passes alone."""

    def __init__(self, question: Question, team: Team, module: nn.Module, inputs: Tree) -> None:
        self._question, self._team = question, team
        # Without backward every schedule is the same, and what is kept for it takes no memory.
        plain: dict[str, Any] = {"schedule": "gpipe", "aggregation": Synchronous(), "stage_memory_bytes": None}
        strategy = self._strategy = replace(question.strategy, **plain)
        self._mesh, self._place = strategy.mesh, strategy.mesh.place(team.world.rank)
        among = Circles.of(self._mesh, team.traffic).shards
        self._shards = None if among is None else GroupShards(among, self._mesh.shard(self._place))
        samples, count = batch_size(inputs), strategy.micro_batch_count
        with excused(team):
            self._made = self._cut(module, rows(inputs, samples, slice(sizes(samples, count)[0])))
        assert team.traffic is not None, "one worker answers by itself"
        self._plan = Plan.of(self._made, strategy.order, strategy.stage_count, count, strategy.copies)
        self._mail = Mail(GroupWire(team.traffic, Routes(self._mesh, self._place)))
        self._part = self._made.parts[self._place.stage]
        self._part.module.eval()
        self._ways: dict[int, Itinerary] = {}

    def takes(self, inputs: Tree) -> bool:
        """Whether it was captured for inputs of this form."""
        return _fits(self._made.captured, inputs)

    def answer(self, inputs: Tree) -> Answer:
        """The last stage's outputs, on its first shards."""
        batch, count = Batch(inputs, (), batch_size(inputs)), self._strategy.micro_batch_count
        outputs = self._through(micro_batches(batch, count, self._made.captured.flat))
        return Answer(outputs if self._mesh.shard(self._place) == 0 else {}, self._made.captured.output)

    def _cut(self, module: nn.Module, first: Any) -> Cut:
        """The model's parts, those of this rank rewritten as its shards."""
        strategy = self._strategy
        units = units_of(strategy, module, first, training=False)
        leaves = units.captured.flat(first)
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

    def _way(self, count: int) -> Itinerary:
        """Through so many micro-batches."""
        if count not in self._ways:
            worker = self._mesh.columns.number(self._mesh.column(self._place))
            self._ways[count] = self._plan.itinerary(worker, count)
        return self._ways[count]

    def _through(self, given: Sequence[MicroBatch]) -> Mapping[int, Sequence[Any]]:
        """All micro-batches through this worker's part; of the last part, the output."""
        way, mail = self._way(len(given)), self._mail
        mail.begin([m for m in way.incoming if not m.gradient], [each.shapes for each in given])
        found: dict[int, Sequence[Any]] = {}
        for task in way.tasks:
            if task.action.kind == "forward":
                index = task.action.micro_batch
                found[index] = _forward(self._part, task, given[index], mail)
        mail.settle()
        return found if self._part.number == len(self._made.parts) - 1 else {}


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
