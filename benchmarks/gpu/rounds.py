"""Turns of all sides of a row in the same processes: memory and results of each alone, then times side by side::

each side alone     a few steps      its peak memory, and how far its parameters are from plain PyTorch's
all sides           begun one inside the other, so that all are there
round 0, 1, 2 ...   a turn of each side, there and back (kit/turns.py)
"""

import functools
import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from kit.crew import Member
from kit.together import gathered, largest, tell
from kit.turns import Step, timed, turns
from kit.work import Begun
from models import Job
from sides import PLAIN, Side, State

CHECKED = 5
"""Steps after which parameters are compared."""

TOLERANCE = 0.05
"""Of the way from A_0 that one process has made, by which a side may end elsewhere. Products of bfloat16 and TF32, and
convolutions that add in any order, differ by a part of that; a side that left out a step, or did not average, ends a
fifth of the way off or more."""

FEWEST, MOST = 1, 50
"""Steps of a turn."""


class Pace(NamedTuple):
    """How often and for how long all are measured."""

    rounds: int
    turn_s: float


def measured(member: Member, job: Job, sides: Mapping[str, Side], pace: Pace) -> dict[str, dict[str, Any]]:
    """Return the figures of each side, of which one is plain PyTorch; all ranks call it together.

    Raises:
        ArithmeticError: a side has not ended with the parameters of plain PyTorch.
    """
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming its collectives
    alone = {name: _alone(member, job, name, side) for name, side in sides.items()}
    apart = _apart(job, {name: state for name, (state, _) in alone.items()})
    times = _times(member, job, sides, pace)
    return {
        name: compared(job, times[name], times[PLAIN]) | {"peak_mib": alone[name][1], "apart": apart[name]}
        for name in sides
    }


def compared(job: Job, times: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Return figures of a side from seconds of a step in each round, its own and those of plain PyTorch."""
    return {
        "step_ms": 1e3 * statistics.median(times),
        "ratio": statistics.median(a / b for a, b in zip(times, plain, strict=True)),
        "samples_per_s": job.samples / statistics.median(times),
        "rounds": len(times),
    }


def _alone(member: Member, job: Job, name: str, side: Side) -> tuple[State, float | None]:
    """Return what a side alone ends with, and its peak memory in MiB on the rank that has most; None: on the CPU."""
    tell(member, Begun(f"{job.task}: {name} alone"))
    release(job.kind)

    def loop(step: Step) -> None:
        for _ in range(CHECKED):
            step()

    if job.kind == "cpu":
        return side(job, loop), None
    torch.accelerator.reset_peak_memory_stats()
    state = side(job, loop)
    peak = largest(torch.accelerator.max_memory_allocated() / 2**20)
    return state, peak


def release(kind: str) -> None:
    """Free what is no longer in use, so that no side's memory counts as another's."""
    gc.collect()
    if kind != "cpu":
        torch.accelerator.empty_cache()


def _apart(job: Job, states: Mapping[str, State]) -> dict[str, float]:
    """Return how far each side has ended from plain PyTorch, as a part of the way that this has made from A_0."""
    expected = gathered(states[PLAIN])[0]
    start = {name: p.detach().cpu() for name, p in job.built().named_parameters()}
    way, found = _distance(expected, start), dict[str, float]()
    if not way > 0:
        raise ArithmeticError(f"{job.task}: no parameter has moved")
    for name, state in states.items():
        parts = {key: value for part in gathered(state) for key, value in part.items()}
        if not expected.keys() <= parts.keys():  # Paceline's state has running buffers as well
            raise ArithmeticError(f"{job.task}: {name} has not trained the parameters of {PLAIN}")
        found[name] = _distance(expected, parts) / way
        if not found[name] <= TOLERANCE:
            raise ArithmeticError(
                f"{job.task}: {name} ended {found[name]:g} of the way of {PLAIN} from it; allowed: {TOLERANCE}"
            )
    return found


def _distance(a: State, b: State) -> float:
    """The Euclidean one."""
    return math.sqrt(sum(float((value.double() - b[name].double()).square().sum()) for name, value in a.items()))


def _times(member: Member, job: Job, sides: Mapping[str, Side], pace: Pace) -> dict[str, list[float]]:
    """Return seconds of a step of each turn, by side."""
    found: dict[str, list[float]] = {}
    begun: dict[str, Step] = {}

    def take_turns() -> None:
        begun[PLAIN]()
        once = largest(timed(functools.partial(burst, job.kind, begun[PLAIN], 1)))
        steps = max(FEWEST, min(MOST, int(pace.turn_s / once)))
        bursts = {name: functools.partial(burst, job.kind, begun[name], steps) for name in sides}
        taken = turns(member, job.task, bursts, pace.rounds, 1)
        found.update({name: [seconds / steps for seconds in times] for name, times in taken.items()})

    release(job.kind)
    _begin(job, dict(sides), begun, take_turns)
    return found


def _begin(job: Job, sides: dict[str, Side], begun: dict[str, Step], then: Callable[[], None]) -> None:
    """Begin all sides, one inside the other, and call ``then`` innermost."""
    if not sides:
        then()
        return
    name = next(iter(sides))
    side = sides.pop(name)

    def loop(step: Step) -> None:
        begun[name] = step
        _begin(job, sides, begun, then)

    side(job, loop)


def burst(kind: str, step: Step, steps: int) -> None:
    """Make so many steps, to the end of the last one: a device may lag behind the host until then."""
    for _ in range(steps):
        step()
    if kind != "cpu":
        torch.accelerator.synchronize()
