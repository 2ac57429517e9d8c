"""Why an operator is left whole, in a few words."""

from typing import Any

import torch

from paceline.replica.tensor import possible
from paceline.replica.tensor.base import Call, rule_of
from paceline.shard_rules import WHOLE

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

_UNITS = {"column": "outputs", "row": "inputs", "filters": "filters", "channels": "channels", "groups": "groups"}

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def why_whole(call: Call, asked: str | None) -> str:
    """Of an operator of which every shard does all.

    Args:
        call: the operator.
        asked: what the strategy's ``shard_rules`` say of its module.
    """
    if asked == WHOLE:
        return "shard_rules say so"
    if operator(call.target).removesuffix("_cell") in _RECURRENT:
        return "its hidden units would have to be gathered in every time step"
    if rule_of(call.target) is None:
        return f"no rule for {operator(call.target)}"
    few = _too_few(call)
    if few:
        return f"{few} can't be divided among {call.shards}"
    return "dividing it would cost more than it saves"


def operator(target: Any) -> str:
    """Its name, without its namespace and overload.

    >>> import torch
    >>> operator(torch.ops.aten.linear.default)
    'linear'
    """
    words = str(target).split(".")
    return words[1] if words[0] == "aten" and len(words) > 1 else str(target)


def _too_few(call: Call) -> str:
    """Of what there are fewer than shards; "": there are enough, or it is not by number."""
    if call.target is ATTENTION:
        heads = call.takes[0].shape[-3] if call.takes[0].dims > 3 else call.shards
        return _counted(heads, "heads") if heads < call.shards else ""
    if any(possible.divides(call, way) for way in possible.ways(call, call.shards)):
        return ""
    named = [way.name for way in possible.ways(call, 1) if possible.divides(call, way)]
    found = [(possible.most(call, name, call.shards), name) for name in dict.fromkeys(named)]
    if not found:
        return ""
    most, name = max(found, key=lambda each: each[0])
    return _counted(most, _UNITS.get(name, "units"))


def _counted(count: int, units: str) -> str:
    return f"{count} {units if count > 1 else units.removesuffix('s')}"
