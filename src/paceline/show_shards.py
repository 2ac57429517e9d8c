"""show_shards: how the operators of a model are divided, what that sends, and what stays whole and why."""

from torch import nn

from paceline.core.errors import InputError
from paceline.engine.base import Budget, Job
from paceline.engine.distributed.run import own_settings
from paceline.engine.setup import first_batch, settle
from paceline.program import Program
from paceline.replica.base import Batch
from paceline.replica.hybrid import division
from paceline.replica.hybrid.table import Stage, StagedSharding
from paceline.replica.pipeline.preparation import first_rows, prepared
from paceline.replica.tensor.preparation import planned
from paceline.replica.tensor.table import Sharding, sharding
from paceline.strategy import Strategy
from paceline.train import check


def show_shards(program: Program, strategy: Strategy | str) -> str:
    """The table of a model's operators: how each is cut, the collectives and bytes of one batch, what stays whole.

    The model is captured and planned as for a run, in this process; nothing is trained and nothing is sent. Of a
    pipeline each stage has a table of its own: where ``cuts=`` do not say where stages begin, that is measured, and
    another call may choose other places.

    Args:
        program: whose model it is.
        strategy: how it is divided, a value or its text: ``"shards=2"``.

    Raises:
        InputError: what :func:`paceline.train` would refuse, or a strategy without shards.

    >>> import torch, functools
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)),
    ...     loss=torch.nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ...     train=(torch.zeros(64, 8), torch.zeros(64, 8)), batch_size=16)
    >>> print(show_shards(program, "shards=2"))
    2 shards; bytes: what a shard sends for one batch, forward and backward
    <BLANKLINE>
    module  operator  cut              parameters  forward     sends
    0       linear    column                  576
    2       linear    row                     520
    2       linear    partial → whole              all-reduce  512 B
    <BLANKLINE>
    divided: 100 % of 1,096 parameters, ... % of the work
    a step: 1 collective, 512 B sent by each shard
    parameters by shard: 552, 544

    Each stage of a pipeline is divided by itself; what goes from stage to stage is not in these tables:

    >>> print(show_shards(program, "stages=2 cuts=2 shards=[2,1] micro_batches=4"))
    stage 0: 2 shards; bytes: what a shard sends for one batch, forward and backward
    <BLANKLINE>
    module  operator  cut            parameters  forward       sends
    0       linear    column                576
    1       relu      split → whole              all-gather  2.05 kB
    <BLANKLINE>
    divided: 100 % of 576 parameters, 100 % of the work
    a step: 4 collectives, 2.05 kB sent by each shard
    parameters by shard: 288, 288
    <BLANKLINE>
    stage 1: whole, with 520 parameters
    """
    return str(divided(program, strategy))


def divided(program: Program, strategy: Strategy | str) -> Sharding | StagedSharding:
    """The same as a value, with its rows."""
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    if not strategy.tensor_parallel:
        raise InputError(f"shards={strategy.shards} leaves the operators whole, so nothing is divided; write shards=2")
    job = Job(program, strategy, Budget("steps", 1, 1))
    with own_settings():
        settle(job, 0)
        module, batch = job.program.build(), first_batch(job)
        if strategy.pipelined:
            return _staged(program, strategy, module, batch)
        with program.autocast(strategy.device):
            _, plan = planned(program, module, batch, max(strategy.stage_workers), strategy.shard_rules)
        return sharding(plan, strategy.shard_rules)


def _staged(program: Program, strategy: Strategy, module: nn.Module, batch: Batch) -> StagedSharding:
    """Of each part, for the micro-batches of a batch that a shard is given, each taken to be as large as the first."""
    cut, rules = prepared(program, strategy, module, batch, lambda choose: choose()).cut, strategy.shard_rules
    stages = [strategy.order.worker_of(part.number, strategy.stage_count) for part in cut.parts]
    leaves = cut.captured.flat(first_rows(strategy, batch))
    plans = division.planned(program, cut, module, leaves, [strategy.mesh.shards(stage) for stage in stages], rules)
    found: list[Stage] = []
    for part, stage, plan in zip(cut.parts, stages, plans, strict=True):
        passes = -(-strategy.micro_batch_count // strategy.copies[stage])
        parameters = sum(each.numel() for each in part.module.parameters())
        found.append(Stage(stage, part.number, parameters, None if plan is None else sharding(plan, rules, passes)))
    return StagedSharding(found)
