"""An optimizer's state in a checkpoint: vectors as chunks by full parameter name, all else as JSON.

torch.optim keeps a dict of state for each parameter::

    parameter "head.weight":  exp_avg     tensor of its shape   -> chunks optimizer/exp_avg/head.weight, cut as it is
                              row_var     tensor of another one -> chunk optimizer/row_var/head.weight, whole
                              step        single number         -> JSON, {"step": {"float32": 12.0}}

A scheduler and the options of each group are JSON, too.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.base import OPTIMIZER, TensorChunk
from paceline.checkpoint.reader import TensorSource
from paceline.checkpoint.scalars import options_to_json, scalar_of_json
from paceline.replica.flat_state import FlatState, TensorEntry

# (prefix of the name, a parameter's entry in the layout, a tensor of its shape) -> its chunks under the full name.
Describe: TypeAlias = Callable[[str, TensorEntry, Tensor], Iterable[TensorChunk]]


def describe_whole(prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterable[TensorChunk]:
    """Describe a tensor that belongs to a whole parameter."""
    yield TensorChunk.whole(f"{prefix}{entry.name}", tensor)


def whole_chunks(state: FlatState, prefix: str = "") -> list[TensorChunk]:
    """Return the tensors of a state that has all of A, parameters and running buffers."""
    return [TensorChunk.whole(f"{prefix}{name}", tensor) for name, tensor in state.named()]


def slots_of(source: TensorSource) -> list[str]:
    """Return the names of the optimizer's state tensors in a checkpoint, as torch.optim calls them."""
    return list(dict.fromkeys(name.split("/")[1] for name in source.names(OPTIMIZER)))


def groups_to_json(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, but its parameters; what JSON can't say is left out."""
    return [options_to_json(group) for group in optimizer.param_groups]


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


def merged_json(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one optimizer that several processes have parts of, each as JSON; {} is that of none.

    >>> one, two = {"parameters": [["w"]], "scalars": {"step": {"all": 3}}}, {"parameters": [["b"]], "scalars": {}}
    >>> merged_json([{}, one, two])
    {'parameters': [['w', 'b']], 'scalars': {'step': {'each': {'w': 3}}}}
    """
    some = [part for part in parts if part]
    # A slice without an element says nothing.
    parts = [part for part in some if any(part["parameters"])] or some[:1]
    if len(parts) < 2:
        return dict(parts[0]) if parts else {}
    groups = [list(dict.fromkeys(chain(*own))) for own in zip(*(part["parameters"] for part in parts), strict=True)]
    scalars: dict[str, Any] = {}
    for slot in dict.fromkeys(slot for part in parts for slot in part["scalars"]):
        found = [part["scalars"].get(slot) for part in parts]
        if all(values is not None and values == found[0] and "all" in values for values in found):
            scalars[slot] = found[0]
            continue
        each: dict[str, Any] = {}
        for part, values in zip(parts, found, strict=True):
            if values is not None:
                each |= values["each"] if "each" in values else dict.fromkeys(chain(*part["parameters"]), values["all"])
        scalars[slot] = {"each": each}
    return {**parts[0], "parameters": groups, "scalars": scalars}


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
