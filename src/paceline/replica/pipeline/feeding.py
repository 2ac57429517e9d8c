"""The parts of a model one after another in this process, each given what the ones before it have made."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.replica.pipeline.base import Cut, Part
from paceline.replica.undisturbed import rewound
from paceline.schedule import Dependencies, Need


class Fed(NamedTuple):
    """A part that has been run."""

    part: Part
    given: list[Any]
    """Leaves of the input, then what was received."""
    made: Sequence[Any]


def fed(cut: Cut, leaves: Sequence[Tensor]) -> Iterator[Fed]:
    """All parts, in order.

    Args:
        cut: of a model.
        leaves: of its input.
    """
    values: dict[str, Any] = {}
    for part in cut.parts:
        given = [*(leaves[i] for i in part.inputs), *(values[crossing.name] for crossing in part.received)]
        made = part.module(*(each.clone() if isinstance(each, Tensor) else each for each in given))
        values |= {crossing.name: value for crossing, value in zip(part.sent, made, strict=False)}
        yield Fed(part, given, made)


def dependencies(cut: Cut, module: nn.Module, leaves: Sequence[Tensor]) -> Dependencies:
    """Which parts need which; only a run tells of which values gradients go back.

    Args:
        cut: of the model.
        module: the model, which is left as it was.
        leaves: of its input, for a few samples.
    """
    with rewound(module):
        needs = [need for each in fed(cut, leaves) for need in _needs(each)]
    return Dependencies.of(len(cut.parts), needs)


def _needs(of: Fed) -> Iterator[Need]:
    for crossing, value in zip(of.part.sent, of.made, strict=False):
        gradient = isinstance(value, Tensor) and value.requires_grad
        yield from (Need(crossing.source, consumer, gradient) for consumer in crossing.consumers)
