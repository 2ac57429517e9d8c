"""Numbers of an optimizer as JSON that says them exactly: steps made, options of its groups."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import InputError


def is_scalar(value: Any) -> bool:
    """Return whether a value of an optimizer's state is a single number."""
    return not isinstance(value, Tensor) or value.dim() == 0


def scalar_to_json(value: Any) -> Any:
    """Return a number, a tensor without dims, or None as JSON that says it exactly.

    Raises:
        InputError: it is something else.

    >>> scalar_to_json(torch.tensor(3.0)), scalar_to_json(float("inf")), scalar_to_json(7)
    ({'float32': 3.0}, {'float': 'inf'}, 7)
    """
    if isinstance(value, Tensor) and not value.is_complex():
        return {str(value.dtype).removeprefix("torch."): scalar_to_json(value.item())}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"the optimizer's state has a {type(value).__name__}, which a checkpoint can't hold; keep tensors and numbers "
        "in it, or leave checkpoint= out"
    )


def scalar_of_json(value: Any) -> Any:
    """Return the value whose :func:`scalar_to_json` this is."""
    if not isinstance(value, Mapping):
        return value
    ((kind, inner),) = value.items()
    return float(inner) if kind == "float" else torch.tensor(scalar_of_json(inner), dtype=getattr(torch, kind))


def scalars_to_json(by_name: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Return a number for each parameter that has it as JSON; one for all where all have the same.

    >>> scalars_to_json({"w": 2, "b": 2}, {"w", "b"}), scalars_to_json({"b": 2}, {"w", "b"})
    ({'all': 2}, {'each': {'b': 2}})
    """
    values = {name: scalar_to_json(value) for name, value in by_name.items()}
    first = next(iter(values.values()))
    same = len(values) == len(parameters) and all(value == first for value in values.values())
    return {"all": first} if same else {"each": values}


def options_to_json(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one group, but its parameters; what JSON can't say is left out."""
    options: dict[str, Any] = {}
    for key, value in group.items():
        if key != "params":
            many = isinstance(value, (tuple, list))
            try:
                options[key] = [scalar_to_json(v) for v in value] if many else scalar_to_json(value)
            except InputError:
                continue  # a function, say: the program gives it again
    return options
