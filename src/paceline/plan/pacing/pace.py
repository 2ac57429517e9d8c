"""How fast a policy goes with replicas that take different times: by equations, or by simulating its updates alone.

>>> found = waiting("synchronous", 8, 0.1, "fraction=0.5 exponential:mean=0.1")
>>> f"{found.step_s(8):.3f} s instead of {found.batch_s:.3f} s"
'0.308 s instead of 0.100 s'
>>> f"{waiting('asynchronous', 8, 0.1, 'fraction=0.5 exponential:mean=0.1').step_s(8):.3f} s"
'0.133 s'
"""

from functools import lru_cache
from typing import Any

from paceline.aggregation import Aggregation, parse, text_of
from paceline.clock.base import Distribution
from paceline.clock.delay import Delay
from paceline.clock.distributions import Constant
from paceline.clock.times import Times
from paceline.core.errors import InputError
from paceline.core.types import Seconds
from paceline.plan.pacing.arrivals import Pace, Simulation
from paceline.plan.pacing.foretold import Team, foretold

__all__ = ["Pace", "pace", "waiting"]

ARRIVALS = 20_000
"""That :func:`waiting` lets happen; at least so many of each replica:"""
ARRIVALS_EACH = 8
_FORGOTTEN = 0.1


def waiting(
    policy: str, replicas: int, step_s: Seconds, delay: str | None = None, *, arrivals: int | None = None
) -> Pace:
    """The pace of replicas that all take the same time for a batch, but for a delay that some of them have.

    By equations where there are any, else simulated over 20,000 arrivals: the mean time of an update is then off by
    about 1 % where delays are as noisy as exponential ones. A simulation of thousands of replicas takes seconds.

    Args:
        policy: as written for a strategy, ``buffered:k=4``.
        replicas: P.
        step_s: of a batch, seconds.
        delay: as written for ``--delay``: ``fraction=0.5 normal:mean=0,std=0.25``, in seconds; None: no delay.
        arrivals: Δs of a whole run, to be simulated from its start: a policy that changes on its way, as smooth-switch
            does, has a pace over a run alone. None: how it goes on after 2,000.

    Raises:
        InputError: a text that can't be read, or a policy that needs what only training tells.

    >>> calm = waiting("synchronous", 4, 0.1)
    >>> calm.batches, round(calm.step_s(4), 9), round(calm.waiting_s(4), 9)
    (4, 0.1, 0.0)
    >>> round(waiting("synchronous", 4, 0.1, "fraction=0.25 constant:value=0.2").waiting_s(4), 9)
    0.2
    """
    return _remembered(policy, replicas, step_s, delay, arrivals)


@lru_cache(maxsize=4096)
def _remembered(text: str, replicas: int, step_s: Seconds, delay: str | None, arrivals: int | None) -> Pace:
    times, late, policy = Times(compute=Constant(step_s)), Delay.parse(delay) if delay else None, parse(text)
    count = arrivals if arrivals is not None else max(ARRIVALS, ARRIVALS_EACH * replicas)
    _refuse(policy, replicas, times, count)
    resolved = policy.resolved(learning_rate=None, replicas=replicas)
    known = foretold(resolved, Team(replicas, step_s, late))
    if known is not None:
        return known
    return pace(policy, replicas, times, late, arrivals=count, forgotten=_FORGOTTEN if arrivals is None else 0.0)


def pace(
    policy: Aggregation[Any],
    replicas: int,
    compute: Distribution | Times,
    delay: Delay | None = None,
    *,
    updates: int | None = None,
    arrivals: int = 100_000,
    seed: int = 0,
    forgotten: float = 0.1,
) -> Pace:
    """Simulate a policy.

    Args:
        policy: any whose needs are nothing but arrivals.
        replicas: P.
        compute: of one batch; or times of messages and updates as well, none of them measured.
        delay: of some of the replicas.
        updates: to stop after; None: after so many ``arrivals``.
        arrivals: Δs that reach the coordinator.
        seed: of all draws.
        forgotten: the share of the run, from its start, that does not count: how it begins is not how it goes on.

    Returns:
        Means over what counts.

    Raises:
        InputError: a policy that needs a loss or a gradient, times that are measured, or nothing to simulate.

    >>> from paceline.aggregation import Asynchronous
    >>> found = pace(Asynchronous(), 4, Constant(0.1), updates=1000)
    >>> round(found.update_s, 9), found.staleness, found.batches
    (0.025, 3.0, 1.0)
    """
    times = compute if isinstance(compute, Times) else Times(compute=compute)
    _refuse(policy, replicas, times, arrivals if updates is None else updates)
    resolved = policy.resolved(learning_rate=None, replicas=replicas)
    simulation = Simulation(resolved, replicas, times, delay, seed)
    whole = arrivals if updates is None else updates
    began = simulation.seen()
    if forgotten:
        _until(simulation, round(whole * forgotten), by_updates=updates is not None)
        began = simulation.seen()
    _until(simulation, whole, by_updates=updates is not None)
    assert not isinstance(times.compute, str), "it was refused"
    return began.pace(simulation.seen(), simulation.micro_steps, times.compute.mean_s)


def _until(simulation: Simulation, count: int, *, by_updates: bool) -> None:
    """And at least one update, for means need one."""
    least = simulation.updates + 1
    while (simulation.updates if by_updates else simulation.arrivals) < count or simulation.updates < least:
        simulation.turn()


def _refuse(policy: Aggregation[Any], replicas: int, times: Times, length: int) -> None:
    if replicas < 1 or length < 1:
        raise InputError(f"{replicas} replicas for {length} updates or arrivals; write at least 1 of each.")
    if policy.needs:
        raise InputError(
            f"{text_of(policy)} goes by {', '.join(sorted(policy.needs))}, which only training tells; write a policy "
            "that goes by arrivals alone, as buffered:k=4."
        )
    if "measured" in (times.compute, times.transfer, times.apply):
        raise InputError(f"times={str(times)!r}: nothing is computed here to be measured; write compute=0.01, say.")
