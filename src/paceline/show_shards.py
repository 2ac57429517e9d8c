"""show_shards: how the operators of a model are divided, what that sends, and what stays whole and why."""

from paceline.core.errors import InputError
from paceline.engine.base import Budget, Job
from paceline.engine.distributed.run import own_settings
from paceline.engine.setup import first_batch, settle
from paceline.program import Program
from paceline.replica.tensor.preparation import planned
from paceline.replica.tensor.table import Sharding, sharding
from paceline.strategy import Strategy
from paceline.train import check


def show_shards(program: Program, strategy: Strategy | str) -> str:
    """The table of a model's operators: how each is cut, the collectives and bytes of one batch, what stays whole.

    The model is captured and planned as for a run, in this process; nothing is trained and nothing is sent.

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
    """
    return str(divided(program, strategy))


def divided(program: Program, strategy: Strategy | str) -> Sharding:
    """The same as a value, with its rows."""
    strategy = Strategy.coerce(strategy)
    check(program, strategy, steps=1)
    count = strategy.shards
    if strategy.tensor_parallel and strategy.pipelined:
        raise InputError(
            f"stages={strategy.stage_count} × shards={count}: each stage is divided by itself, after the model is cut, "
            "and this table is of a whole model; write stages=1, or --show-stages for where it is cut"
        )
    if not strategy.tensor_parallel or isinstance(count, tuple):
        raise InputError(f"shards={count} leaves the operators whole, so nothing is divided; write shards=2")
    job = Job(program, strategy, Budget("steps", 1, 1))
    with own_settings():
        module, batch = settle(job, 0), first_batch(job)
        with program.autocast(strategy.device):
            _, plan = planned(program, module, batch, count, strategy.shard_rules)
        return sharding(plan, strategy.shard_rules)
