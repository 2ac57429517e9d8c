"""Of all layers for one micro-batch: what bounds are made of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import Seconds
from paceline.plan.base import Arrangement, LayerCost, Workload
from paceline.plan.cluster import Cluster
from paceline.plan.division import layer_s, layers_of, own_parameters


@dataclass(frozen=True, slots=True)
class Alike:
    """Layers that are the same, n of them: of p stages one has ⌈n / p⌉ of them or more."""

    many: int
    seconds: Seconds
    """Of each."""
    parameters: int
    """Of each; 0 where they share them."""
    saved_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all layers on one worker of t shards, for b samples."""

    seconds: Seconds
    longest: Seconds
    gaps: Seconds
    """max(F, B / 2): what zero-bubble can't fill."""
    backward: Seconds
    parameters: float
    saved: float
    """Bytes kept from forward to backward."""
    message_bytes: float
    """The least that goes on from a layer."""
    alike: Alike
    """Of those that are the same, the ones that take most time together."""


def summed(workload: Workload, cluster: Cluster, plain: Arrangement) -> Sums:
    """Of an arrangement's b, shards and recomputation."""
    layers = layers_of(workload, plain)
    each = seconds(layers, cluster, plain)
    forward, backward = sum(x.forward_s for x in layers), sum(x.backward_s for x in layers)
    return Sums(
        sum(each[id(layer)] for layer in layers),
        max(each.values()),
        max(forward, backward / 2),
        backward,
        own_parameters([(layer, 1) for layer in layers]),
        sum(layer.saved_bytes for layer in layers),
        min((layer.output_bytes for layer in layers[:-1]), default=0),
        _alike(layers, each),
    )


def seconds(layers: Sequence[LayerCost], cluster: Cluster, arrangement: Arrangement) -> dict[int, Seconds]:
    """Of each layer, by its id: those that are one object are asked for once."""
    return {same: layer_s(layer, cluster, arrangement) for same, layer in {id(each): each for each in layers}.items()}


def _alike(layers: Sequence[LayerCost], each: dict[int, Seconds]) -> Alike:
    many = Counter(map(id, layers))
    layer = max(layers, key=lambda layer: many[id(layer)] * each[id(layer)])
    own = 0 if layer.tied else layer.parameters
    return Alike(many[id(layer)], each[id(layer)], own, layer.saved_bytes, layer.working_bytes)
