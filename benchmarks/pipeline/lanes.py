"""A picture of one step beside what its schedule allows."""

from job import Job
from kit.crew import Member
from kit.together import tell
from models import MICRO_BATCHES
from ours import times, trained

import paceline.comm

STEPS = 9
"""That are recorded; the picture has the median one."""


def swimlane(member: Member, size: str, name: str, backend: str) -> None:
    """Tell the picture of a schedule, as SVG."""
    from paceline.metrics.pipeline_step import pipeline_step

    paceline.comm.register()
    run = trained(f"schedule={name}", Job(size, MICRO_BATCHES, backend), STEPS, times(STEPS), trace=True)
    step = pipeline_step(run.spans, run.strategy, run.summary)
    assert step is not None, "a pipeline has made whole steps"
    tell(member, step.svg())
