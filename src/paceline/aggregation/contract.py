"""What a policy answers, checked: its properties before a run begins, its decisions where they are executed.

::

    before any work    delta, adopt, needs, ...; start(), waits_for()    check_properties, check_start: InputError
    at an event        (state, decision)                                 check_answer: PacelineError
    as it is executed  Apply, Release, Discard, Cancel                   check_action, where executing it has failed

What a good policy answers costs next to nothing to check; what is wrong with a bad one is looked for afterwards.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from types import MethodType
from typing import Any, NamedTuple, get_args

from paceline.aggregation.base import (
    Aggregation,
    Apply,
    Arrival,
    Cancel,
    Combine,
    Discard,
    Need,
    Portion,
    Release,
)
from paceline.aggregation.state_codec import encode
from paceline.core.delta import Adopt, Delta
from paceline.core.errors import InputError, PacelineError
from paceline.core.text_form import text_of
from paceline.core.types import Clock, ReplicaId
from paceline.reduction.base import Reducer


class _Property(NamedTuple):
    """What a property may be, and examples of it."""

    allows: Callable[[Any], bool]
    write: str


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


_PROPERTIES: Mapping[str, _Property] = {
    "delta": _Property(
        lambda value: isinstance(value, get_args(Delta)), "Gradient(), Accumulated(2), Change(16), Distance(16)"
    ),
    "adopt": _Property(lambda value: isinstance(value, get_args(Adopt)), "Replace(), Mix(0.5), Keep(), Rebase()"),
    "needs": _Property(
        lambda value: isinstance(value, frozenset) and value <= set(get_args(Need)),
        f"frozenset({{'loss'}}), of {', '.join(get_args(Need))}",
    ),
    "collective": _Property(lambda value: value in (None, *get_args(Combine)), "None, 'mean', 'sum'"),
    "current": _Property(lambda value: isinstance(value, bool), "True, False"),
    "portions": _Property(lambda value: value is None or _whole(value, 1), "None, 8"),
    "reducer": _Property(lambda value: value is None or isinstance(value, Reducer), "None, a Reducer's object"),
}


def check_properties(policy: Aggregation[Any]) -> None:
    """Raise InputError for a property that is of another type than the contract's."""
    for name, (allows, write) in _PROPERTIES.items():
        found = getattr(policy, name)
        if not allows(found):
            raise _refused(policy, name, found, write)


def check_start(policy: Any, replicas: int, *, saved: bool = False) -> None:
    """Raise InputError if a policy can't begin.

    Args:
        policy: resolved.
        replicas: of the run.
        saved: whether checkpoints are to hold its state.
    """
    if not isinstance(policy, Aggregation):
        raise InputError(f"the policy's resolved() returned {policy!r}; return self, or replace(self, …)")
    state, slots = policy.start(0 if policy.portions else replicas), policy.slots(replicas)
    threshold, deadline = policy.waits_for(state), policy.deadline(state)
    if not _whole(slots, 1):
        raise _refused(policy, "slots()", slots, "1, 2")
    if not _whole(threshold, 0):
        raise _refused(policy, "waits_for()", threshold, "1, 2")
    if deadline is not None and not (isinstance(deadline, Real) and not math.isnan(deadline)):
        raise _refused(policy, "deadline()", deadline, "None, a time of the run in seconds")
    if saved:  # refused now, not at the first checkpoint
        encode(state, policy)


def _refused(policy: Aggregation[Any], name: str, found: object, write: str) -> InputError:
    kind = "; that is a class, write its object" if isinstance(found, type) else ""
    if isinstance(found, MethodType):
        kind = f"; that is a method, write @property above def {name}"
    return InputError(f"{text_of(policy)}: {name} is {_shown(found)}; return one of {write}{kind}")


def check_answer(policy: Aggregation[Any], answer: Any) -> None:
    """Raise PacelineError unless an answer to an event is a state and a decision."""
    if type(answer) is tuple and len(answer) == 2 and type(answer[1]) is tuple:
        return
    raise PacelineError(
        f"{text_of(policy)} answered {_shown(answer)} to an event; arrived(), left(), joined() and tick() must return "
        "(state, decision), and a decision is a tuple: state, (Release((0,)),) for instance, or state, ()"
    )


def check_names(
    policy: Aggregation[Any], named: Iterable[Arrival], held: Collection[tuple[ReplicaId, Clock]]
) -> list[tuple[ReplicaId, Clock]]:
    """Return the replica and the clock of each of these Δs.

    Raises:
        PacelineError: one of them is not held, or named twice.
    """
    names = [(arrival.replica, arrival.clock) for arrival in named]
    one = len(names) == 1 and names[0] in held  # mostly, and without a set
    if not one and (len(set(names)) < len(names) or not all(name in held for name in names)):
        raise PacelineError(
            f"{text_of(policy)} named Δs (replica, clock) {sorted(names)}, "
            f"but holds {sorted(held)}: each Δ must be applied or discarded exactly once"
        )
    return names


def check_left(policy: Aggregation[Any], held: Collection[tuple[ReplicaId, Clock]]) -> None:
    """Raise PacelineError if a policy still holds Δs when no replica is left."""
    if held:
        raise PacelineError(
            f"{text_of(policy)} still holds Δs (replica, clock) {sorted(held)}, but no replica is left: its arrived() "
            "and left() must Apply or Discard each Δ, with P = 0 all that are held"
        )


def check_release(policy: Aggregation[Any], replica: ReplicaId, places: int) -> None:
    """Raise PacelineError for the number of a replica that there never was."""
    if not (_whole(replica, 0) and replica < places):
        raise PacelineError(
            f"{text_of(policy)} let replica {replica!r} go on; there are replicas 0 to {places - 1}: release those "
            "that arrivals name"
        )


def check_portions(policy: Aggregation[Any], action: Release | Cancel) -> None:
    """Raise PacelineError unless each replica that goes on has a portion, if the policy deals them out."""
    deals = policy.portions is not None
    if len(action.portions) != len(action.replicas) * deals:
        raise PacelineError(
            f"{text_of(policy)} let {len(action.replicas)} replicas go on with {len(action.portions)} "
            f"portions; each needs {'one' if deals else 'none'}, as its portions is {policy.portions}"
        )


def check_action(policy: Aggregation[Any], action: Any) -> None:
    """Raise PacelineError for what is no action, or one that can't be executed."""

    def refuse(wrong: str, write: str) -> PacelineError:
        return PacelineError(f"{text_of(policy)} decided {_shown(action)}: {wrong}; write {write}")

    if isinstance(action, Apply):
        pairs, form = action.deltas, "Apply(((arrival, 1.0),)), pairs of a Δ's Arrival and its weight"
        if not (isinstance(pairs, tuple) and all(map(_is_pair, pairs))):
            raise refuse("its deltas are no such pairs", form)
        if not pairs:
            raise refuse("it has no Δ", f"{form}, or leave it out")
        if not all(_finite(weight) for _, weight in pairs):
            raise refuse("a weight is no finite number", form)
        if not (_finite(action.rate) and action.rate >= 0):
            raise refuse("its rate is no finite number of at least 0", "Apply(deltas, rate=0.5)")
    elif isinstance(action, Discard):
        if not (isinstance(action.arrivals, tuple) and all(isinstance(each, Arrival) for each in action.arrivals)):
            raise refuse("its arrivals are no Δs", "Discard((arrival,))")
    elif isinstance(action, Release | Cancel):
        kind = type(action).__name__
        if not (isinstance(action.replicas, tuple) and all(_whole(each, 0) for each in action.replicas)):
            raise refuse("its replicas are no numbers of replicas", f"{kind}((arrival.replica,))")
        if not (isinstance(action.portions, tuple) and all(isinstance(each, Portion) for each in action.portions)):
            raise refuse("its portions are none", f"{kind}((0,), (Portion(number, batch),))")
    else:
        raise refuse("that is no action", "Apply, Release, Discard or Cancel")


def sound(action: Apply) -> bool:
    """Return whether an update has Δs, and weights and a rate that can be computed with."""
    total: float = action.rate
    for _, weight in action.deltas:
        total += weight
    return bool(action.deltas) and action.rate >= 0 and math.isfinite(total)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Arrival) and isinstance(pair[1], Real)


def _shown(value: object) -> str:
    """Return a value as text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
