"""Whether all sides have trained the same, and whether that says anything."""

from collections.abc import Mapping

from job import Job
from kit.together import gathered, largest
from torch import Tensor

STEPS = 5
"""After which they are compared."""

TOLERANCE = 1e-5
"""Parameters are below 1 or little above; float32 keeps 6e-8 of them at a step, and schedules sum in orders of their
own."""

MOVED = 1e-3
"""How far a parameter at least must have gone from A_0: a hundred times what a difference may be."""

State = Mapping[str, Tensor]


def differences(states: Mapping[str, State], reference: str) -> dict[str, float]:
    """The largest of a parameter from the reference's, on any rank, by side.

    Raises:
        ArithmeticError: a side ended with other parameters, or without some of them.
    """
    wanted, found = states[reference], {}
    for name, state in states.items():
        known = set().union(*gathered(set(state)))
        if known != set(wanted):
            raise ArithmeticError(f"{name} has not trained {sorted(known ^ set(wanted))} as {reference} has")
        found[name] = largest(max((_distance(p, wanted[n]) for n, p in state.items()), default=0.0))
        if not found[name] <= TOLERANCE:
            raise ArithmeticError(
                f"{name} ended {found[name]:g} from {reference} in some parameter, from the same A_0 and batches; "
                f"allowed: {TOLERANCE:g}"
            )
    return found


def moved(job: Job, state: State) -> float:
    """The longest way of a parameter from A_0.

    Raises:
        ArithmeticError: it is too short for equal ends to say anything.
    """
    start = dict(job.model.built().named_parameters())
    furthest = max(_distance(start[name].detach(), value) for name, value in state.items())
    if not furthest >= MOVED:
        raise ArithmeticError(f"no parameter has gone further than {furthest:g}; needed: {MOVED:g}")
    return furthest


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
