"""Jobs that are planned for, and tried, on this host."""

import os
from dataclasses import replace

from paceline.engine.base import Budget, Job
from paceline.engine.setup import first_batch
from paceline.engine.trial import trial
from paceline.program import Program
from paceline.strategy import Strategy


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def job_for(program: Program, strategy: Strategy | str, steps: int = 1) -> Job:
    """A short run, as an engine takes it.

    Raises:
        InputError: the program can't make a step.
    """
    strategy = Strategy.coerce(strategy)
    draft = Job(program, strategy, Budget("steps", steps, steps))
    seen = trial(program, first_batch(draft))
    policy = strategy.aggregation.resolved(learning_rate=seen.learning_rate, replicas=strategy.replicas)
    return replace(
        draft,
        program=replace(program, metrics=seen.metrics, test=None),
        strategy=replace(strategy, aggregation=policy),
        running_buffers=seen.running_buffers,
    )
