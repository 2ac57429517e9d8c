"""What the rule of an operator has for it, whatever was planned: its ways by name, and among how many shards."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from paceline.replica.tensor.base import Call, Value, Way, divided
from paceline.replica.tensor.layouts import SHARED, WHOLE, Layout, Owned, Split

_MADE_WHOLE: frozenset[Layout] = frozenset((WHOLE, SHARED))


def module_of(call: Call, owners: Mapping[str, str]) -> str:
    """The full name of an operator's module; of a module that another one reaches into, as attention into its output's
    layer, that of the layer that holds the parameters.
    """
    owner = owners.get(call.node.name, "")
    within = f"{owner}." if owner else ""
    held = (str(value.parameter).rpartition(".")[0] for value in parameters(call))
    return next((name for name in held if name.startswith(within)), owner)


def parameters(call: Call) -> list[Value]:
    """What it takes of the model's parameters."""
    return [value for value in call.takes if value.parameter is not None and value.differentiable]


def divides(call: Call, way: Way) -> bool:
    """Whether it divides a parameter."""
    return any(
        value.parameter is not None and isinstance(layout, (Split, Owned))
        for value, layout in zip(call.takes, way.takes, strict=True)
    )


def ways(call: Call, shards: int) -> Iterator[Way]:
    """Those that its rule has among so many shards, where all that it takes is there as a whole."""
    yield from divided(replace(call, shards=shards), [_MADE_WHOLE] * len(call.takes))


def names(call: Call, shards: int) -> list[str]:
    """Of those ways."""
    return list(dict.fromkeys(way.name for way in ways(call, shards) if way.name))


def most(call: Call, name: str, shards: int) -> int:
    """Among how many shards, below ``shards``, a way of this name divides it; 0: there is none."""
    return next((count for count in range(shards - 1, 0, -1) if name in names(call, count)), 0)
