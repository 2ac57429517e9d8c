"""Checks of options of a run by their values alone: the command line makes them before torch is imported.

Each raises InputError with the value, the rule and a line that keeps it.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

from paceline.core.errors import InputError, unknown
from paceline.core.types import OnDeath, OnNonFinite

_PATIENCE = {"timeout_s": 60, "suspect_after_s": 5}


def check_reactions(on_nonfinite: object, on_death: object, **patience: Any) -> None:
    """Check what a run does about values that are not finite, dead replicas and silent ones.

    Args:
        on_nonfinite: as of :func:`~paceline.train`.
        on_death: likewise; None: what the engine can.
        patience: ``suspect_after_s`` and ``timeout_s``.
    """
    if on_nonfinite not in get_args(OnNonFinite):
        raise unknown("on_nonfinite", str(on_nonfinite), get_args(OnNonFinite))
    if on_death is not None and on_death not in get_args(OnDeath):
        raise unknown("on_death", str(on_death), get_args(OnDeath))
    for name, value in patience.items():
        if not (is_number(value) and value > 0):
            raise InputError(f"{name}={value!r} must be a number of seconds above 0; write {name}={_PATIENCE[name]}")


def check_amounts(given: Mapping[str, Any]) -> None:
    """Check budgets and the distance of evaluations; None: it is not given."""
    for name, value in given.items():
        if value is None:
            continue
        usual: float = 10
        right = is_number(value) and 0 < value < math.inf
        if name == "steps":
            rule = "a whole number above 0"
            usual = max(1, round(value)) if right else usual
            right = right and value == int(value)
        else:
            rule = "a finite number above 0" if value == math.inf else "a number above 0"
        if not right:
            raise InputError(f"{name}={value!r} must be {rule}; write {name}={usual}")


def check_folder_given(folder: object, **about: object) -> None:
    """Check that options about checkpoints, if they say anything, have a folder."""
    for name, value in about.items():
        if folder is None and value:
            raise InputError(f"{name}={value!r} says no folder; write checkpoint='ckpt' too")


def check_samples(name: str, value: object) -> None:
    """Check a number of samples; None: it is not given."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InputError(f"{name}={value!r} must be a whole number of samples, at least 1; write {name}=32")


def check_seed(seed: object) -> None:
    """Check a seed, as torch takes it."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed={seed!r} must be a whole number from 0 to 2^63 - 1; write seed=0")


def is_number(value: Any) -> bool:
    """Return True for a number; False for a bool and for NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
