"""show_stages, show_shards and show_mesh: what a strategy makes of a model and of the ranks, without training."""

from collections.abc import Sequence

from paceline.api.mesh_drawing import draw_mesh
from paceline.api.train import check
from paceline.core.errors import InputError
from paceline.engine.base import Budget, Job
from paceline.engine.run_context import first_batch, own_settings, set_threads_and_seed
from paceline.program import Program
from paceline.replica import hybrid
from paceline.replica.hybrid import StagedSharding, StageTable
from paceline.replica.pipeline.cut_table import cut_table
from paceline.replica.pipeline.prepare import first_rows, prepare_cut
from paceline.replica.tensor.prepare import plan_program
from paceline.replica.tensor.sharding_report import ShardingReport, sharding_report
from paceline.strategy import Strategy


def show_stages(program: Program, strategy: Strategy | str) -> str:
    """Return the table of a pipeline's stages: modules, share of the time, parameters, bytes sent.

    The model is captured, measured, cut and verified as for a run, in this process; nothing is trained. Times are
    measured, so if several cuts are nearly as good, another call may choose another one.

    Args:
        program: program whose model is cut.
        strategy: a value or its text: ``"stages=2"``.

    Returns:
        The table: times in milliseconds, bytes of one micro-batch.

    Raises:
        InputError: :func:`paceline.train` would refuse the strategy, or it has no stages.

    >>> import torch, functools
    >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    >>> program = Program(
    ...     model=lambda: torch.nn.Sequential(*layers), loss=torch.nn.functional.mse_loss,
    ...     optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(torch.zeros(64, 8), torch.zeros(64, 8)))
    >>> print(show_stages(program, "stages=2 cuts=3"))
    2 stages; slowest: ... ms, forward and backward of one micro-batch; bytes sent: of one micro-batch, forward
    <BLANKLINE>
    stage  from  to  time  parameters  sends
        0  0     2   ... %         216  to 1: 256 B
        1  3     3   ... %          72
    """
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    if strategy.order.parts(strategy.stage_count) < 2:
        raise InputError(f"stages={strategy.stage_count} leaves the model whole, so there is no cut; write stages=2")
    job = Job(program, strategy, Budget("steps", 1, 1))
    # Costs are measured with the threads of one worker; own_settings() restores those of the caller.
    with own_settings():
        set_threads_and_seed(job, 0)
        prepared = prepare_cut(program, strategy, program.build(), first_batch(job), lambda choose: choose())
    assert prepared.costs is not None, "this process measured them"
    copies = [
        strategy.copies[strategy.order.worker_of(part.number, strategy.stage_count)] for part in prepared.cut.parts
    ]
    return cut_table(prepared.cut, prepared.units, prepared.costs, copies)


def show_shards(program: Program, strategy: Strategy | str) -> str:
    """Return the table of a model's operators: placement, collectives and bytes of one batch, and why some stay whole.

    The model is captured and planned as for a run, in this process; nothing is trained and nothing is sent. A pipeline
    has one table per stage: unless ``cuts=`` says where stages begin, that is measured, and another call may choose
    other cuts.

    Args:
        program: program whose model is divided.
        strategy: a value or its text: ``"shards=2"``.

    Returns:
        The table: bytes that one shard sends for one batch, forward and backward.

    Raises:
        InputError: :func:`paceline.train` would refuse the strategy, or it has no shards.

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
    return str(sharding_of(program, strategy))


def sharding_of(program: Program, strategy: Strategy | str) -> ShardingReport | StagedSharding:
    """Return the table of :func:`show_shards` as a value, with its rows."""
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    if not strategy.tensor_parallel:
        raise InputError(f"shards={strategy.shards} leaves the operators whole, so nothing is divided; write shards=2")
    job, rules = Job(program, strategy, Budget("steps", 1, 1)), strategy.shard_rules
    with own_settings():
        set_threads_and_seed(job, 0)
        module, batch = program.build(), first_batch(job)
        if not strategy.pipelined:
            with program.autocast("cpu"):  # where the model is captured, wherever it runs
                _, plan = plan_program(program, module, batch, max(strategy.stage_workers), rules)
            return sharding_report(plan, rules)
        cut = prepare_cut(program, strategy, module, batch, lambda choose: choose()).cut
        stages = [strategy.order.worker_of(part.number, strategy.stage_count) for part in cut.parts]
        leaves = cut.captured.flatten(first_rows(strategy, batch))
        counts = [strategy.mesh.shards(stage) for stage in stages]
        plans = hybrid.plan_parts(hybrid.ShardingRequest(program, cut, module, leaves, counts, rules))
        tables: list[StageTable] = []
        for part, stage, part_plan in zip(cut.parts, stages, plans, strict=True):
            # The micro-batches of one worker, each taken to be as large as the first.
            passes = -(-strategy.micro_batch_count // strategy.copies[stage])
            report = None if part_plan is None else sharding_report(part_plan, rules, passes)
            parameters = sum(parameter.numel() for parameter in part.module.parameters())
            tables.append(StageTable(stage, part.number, parameters, report))
        return StagedSharding(tables)


def show_mesh(strategy: Strategy | str, hosts: int | Sequence[int] | None = None, engine: str = "local") -> str:
    """Return the drawing of a mesh: ranks by replica, stage and shard, hosts, and the groups that communicate.

    Nothing is started. Each line of groups says how often they communicate, which shows the load on the network
    between hosts.

    Args:
        strategy: a value or its text: ``"replicas=2 stages=2 shards=2"``.
        hosts: number of hosts over which the ranks are spread evenly, or the number of ranks of each host; None: as
            torchrun spreads them if it started this process (``LOCAL_WORLD_SIZE`` on each host), else one host. On Ray:
            number of nodes with equally many cores, or the number of cores of each.
        engine: ``ray`` places whole replicas, and A is with a server; all others place ranks in their order.

    Returns:
        The drawing.

    Raises:
        InputError: the hosts don't have as many ranks as the strategy has workers; on Ray, one has no core.

    >>> print(show_mesh("replicas=2 stages=2 shards=2", hosts=2))
    replicas=2 × stages=2 × shards=2 = 8 ranks on 2 hosts; | is between two hosts
    <BLANKLINE>
             replica 0  replica 1
             host 0     host 1
    stage 0  0 1        4 5
    stage 1  2 3        6 7
    <BLANKLINE>
    shards of a stage    several times in each layer       0-1 2-3 4-5 6-7  each inside a host
    from stage to stage  each micro-batch, there and back  0>2 1>3 4>6 5>7  each inside a host
    peers of a part      once a step                       0-4 1-5 2-6 3-7  4 of 4 between hosts
    <BLANKLINE>
    placement: shards of a stage stand in a row, then the stages of a replica, then replicas; hosts take them in that
    order
    """
    return str(draw_mesh(strategy, hosts, engine))
