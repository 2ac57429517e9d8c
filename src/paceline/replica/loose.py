"""Gradients that stay where a backward pass has left them."""

from dataclasses import dataclass, field

from torch import Tensor

from paceline.replica.state import Layout

WORTH = 4096
"""Elements of a tensor, on average, from which it costs less to step on each by itself than to copy all of them."""


@dataclass
class Loose:
    """Hands them from a replica to who steps on them, in place of a Δ that is written into a slot."""

    gradients: list[Tensor] = field(default_factory=list)
    """Of the newest Δ, in the layout's order."""


def worthwhile(layout: Layout) -> bool:
    """Whether the tensors of a layout are large enough."""
    names = layout.parameter_names
    return bool(names) and sum(block.elements for block in layout.parameters) >= WORTH * len(names)
