"""show_stages: where a pipeline's model is cut, and why there."""

from paceline.core.errors import InputError
from paceline.engine.base import Budget, Job
from paceline.engine.distributed.run import own_settings
from paceline.engine.setup import first_batch, settle
from paceline.program import Program
from paceline.replica.pipeline.preparation import prepared
from paceline.replica.pipeline.table import table
from paceline.strategy import Strategy
from paceline.train import check


def show_stages(program: Program, strategy: Strategy | str) -> str:
    """The table of a pipeline's stages: what each runs, its share of the time, its parameters, what it sends.

    The model is captured, measured, cut and checked as for a run, in this process; nothing is trained. Times are
    measured, so where several cuts are nearly as good another call may choose another one.

    Args:
        program: whose model it is.
        strategy: how it is split, a value or its text: ``"stages=2"``.

    Raises:
        InputError: what :func:`paceline.train` would refuse, or a strategy without stages.

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
    with own_settings():
        settle(job, 0)
        made = prepared(program, strategy, program.build(), first_batch(job), lambda choose: choose())
    assert made.costs is not None, "they were measured here"
    turns = [strategy.copies[strategy.order.worker_of(part.number, strategy.stage_count)] for part in made.cut.parts]
    return table(made.cut, made.units, made.costs, turns)
