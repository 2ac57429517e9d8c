"""A model that is divided is captured once for all its workers: by main, where it starts them, else by the first one.

::

    local         main: capture, while the fork server imports and ranks start ---- graph ----> workers: attach it
    ranks         rank 0: capture ---- gather ----> ranks: attach it
"""

import functools
from collections.abc import Callable

from torch import nn

from paceline.comm.shared_memory import SpillAllocator
from paceline.core.deadline import limited
from paceline.core.errors import WaitTimeoutError
from paceline.core.types import Seconds
from paceline.device import CPU
from paceline.engine.base import Job
from paceline.engine.run_context import first_batch
from paceline.engine.spmd.rank_context import RankContext
from paceline.replica.capture.capture import Captured, is_sequential
from paceline.replica.capture.handover import Obtain, attached, packed
from paceline.replica.module_utils import materialize
from paceline.replica.pipeline.prepare import Share, capture_for_stages
from paceline.replica.tensor.prepare import capture_with_loss
from paceline.strategy import Strategy

# A capture has this long even where ``timeout_s`` is less: the first one in a process imports a good deal.
LEAST_S: Seconds = 60.0


def captured_for_workers(job: Job) -> bytes | None:
    """Return the capture of a job's model, made in this process.

    None where each worker captures by itself: on devices, whose names are in the graph, and where a graph of an
    nn.Sequential's children is enough, which takes no time.

    Raises:
        InputError: the model can't be captured.
        WaitTimeoutError: it takes longer than ``timeout_s``.
    """
    program, strategy = job.program, job.strategy
    if strategy.device != CPU.type:
        return None
    module, batch = materialize(program, SpillAllocator()), first_batch(job)
    if is_sequential(module) and not (strategy.tensor_parallel or strategy.cuts):
        return None

    def make() -> Captured:
        with program.autocast(strategy.device):
            if strategy.pipelined:
                return capture_for_stages(program, strategy, module, batch)
            return capture_with_loss(program, module, batch)

    return packed(bounded(job, make), values=strategy.tensor_parallel)


def captured_once(job: Job, context: RankContext) -> Obtain:
    """Return what captures a model on one rank for all; they call it together."""

    def obtain(make: Callable[[], Captured], module: nn.Module) -> Captured:
        make, own = functools.partial(bounded, job, make), None
        content = job.captured() if callable(job.captured) else job.captured
        if job.strategy.device != CPU.type:
            return make()
        if content is None:
            if context.world.rank == 0:
                own = make()
                content = packed(own, values=job.strategy.tensor_parallel)
            content = context.gather(content, "the capture of the model")[0]
        if content is not None:
            return attached(content, module)
        return make() if own is None else own

    return obtain


def preparing(strategy: Strategy) -> str:
    """Return what the workers of a divided model do before they train, for progress."""
    return "planning shards" if strategy.tensor_parallel else "cutting stages"


def share_of(job: Job, context: RankContext) -> Share:
    """Return a rank's share of the preparation of a pipeline.

    Of one graph for all, the last rank verifies the loss and, while the first one measures, the graph; and the cut.
    """
    last = context.world.rank == context.world.size - 1
    alone = job.strategy.device != CPU.type or last

    def all_say(own: bool) -> bool:
        return all(context.gather(own, "whether the graph of the model takes one sample"))

    return Share(captured_once(job, context), verifies=alone, all_say=all_say)


def bounded(job: Job, make: Callable[[], Captured]) -> Captured:
    """Capture a model within the job's ``timeout_s``, but :data:`LEAST_S` at least."""
    bound_s = max(job.timeout_s, LEAST_S)
    try:
        with limited(bound_s):
            return make()
    except TimeoutError as error:
        name = job.program.name
        raise WaitTimeoutError(
            f"the model of {name} was not captured as a graph within {bound_s:g} s; write "
            f"timeout_s={10 * bound_s:g}, or the model as an nn.Sequential of its parts, or stages=1 shards=1"
        ) from error
