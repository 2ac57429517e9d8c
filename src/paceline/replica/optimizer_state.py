"""An optimizer's state in a checkpoint: vectors as chunks by full parameter name, all else as JSON.

torch.optim keeps a dict of state for each parameter::

    parameter "head.weight":  exp_avg     tensor of its shape   -> chunks optimizer/exp_avg/head.weight, cut as it is
                              row_var     tensor of another one -> chunk optimizer/row_var/head.weight, whole
                              step        single number         -> JSON, {"step": {"float32": 12.0}}

A scheduler and the options of each group are JSON, too.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.base import OPTIMIZER, TensorChunk
from paceline.checkpoint.reader import Checkpoint
from paceline.core.errors import InputError
from paceline.replica.flat_state import FlatState, TensorEntry

# (prefix of the name, a parameter's entry in the layout, a tensor of its shape) -> its chunks under the full name.
Describe: TypeAlias = Callable[[str, TensorEntry, Tensor], Iterable[TensorChunk]]


def describe_whole(prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterable[TensorChunk]:
    """Describe a tensor that belongs to a whole parameter."""
    yield TensorChunk.whole(f"{prefix}{entry.name}", tensor)


def whole_chunks(state: FlatState, prefix: str = "") -> list[TensorChunk]:
    """Return the tensors of a state that has all of A, parameters and running buffers."""
    return [TensorChunk.whole(f"{prefix}{name}", tensor) for name, tensor in state.named()]


def slots_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the optimizer's state tensors in a checkpoint, as torch.optim calls them."""
    return list(dict.fromkeys(name.split("/")[1] for name in checkpoint.names(OPTIMIZER)))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


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
        return {dtype_name(value.dtype): scalar_to_json(value.item())}
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


def scalars_to_json(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return a number for each parameter as JSON; one for all where they are the same."""
    values = {name: scalar_to_json(value) for name, value in by_name.items()}
    first = next(iter(values.values()))
    return {"all": first} if all(value == first for value in values.values()) else {"each": values}


def groups_to_json(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, but its parameters; what JSON can't say is left out."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options: dict[str, Any] = {}
        for key, value in group.items():
            if key != "params":
                many = isinstance(value, (tuple, list))
                try:
                    options[key] = [scalar_to_json(v) for v in value] if many else scalar_to_json(value)
                except InputError:
                    continue  # a function, say: the program gives it again
        groups.append(options)
    return groups


def restore_groups(optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Set the options of each group to those that :func:`groups_to_json` returned; tensors keep their storage."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            before = group.get(key)
            new = [scalar_of_json(v) for v in value] if isinstance(value, list) else scalar_of_json(value)
            if isinstance(before, Tensor):
                before.copy_(torch.as_tensor(new))
            else:
                group[key] = tuple(new) if isinstance(before, tuple) else new


def scheduler_to_json(scheduler: LRScheduler | None) -> Any:
    """Return a scheduler's state, or None if there is none or JSON can't say it exactly: then it has to be replayed."""
    if scheduler is None:
        return None
    try:
        state = scheduler.state_dict()
        same: bool = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        return None
    return state if same else None


def restore_scheduler(scheduler: LRScheduler, saved: Any, steps: int) -> None:
    """Bring a new scheduler to where one was after ``steps`` steps, by its saved state or by making them again."""
    if saved is not None:
        scheduler.load_state_dict(saved)
        return
    for _ in range(steps):
        scheduler.step()
