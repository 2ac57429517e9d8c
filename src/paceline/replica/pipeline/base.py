"""A model cut into parts: what each holds, takes, makes and sends.

::

    input leaves --> part 0 --a--> part 1 --b--> part 2 --> output
                        `------------c------------^          c: straight from where it is made to where it is needed

Later parts need what earlier ones make, never the other way round.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule

from paceline.replica.capture import Captured


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one part makes and later parts need."""

    name: str
    """Of the node that makes it."""
    source: int
    consumers: tuple[int, ...]
    """Parts, ascending."""


@dataclass(frozen=True)
class Part:
    """A contiguous piece of a model."""

    number: int
    module: GraphModule
    """With the tensors that it uses alone, under their full names. Its forward takes ``inputs``, then ``received``; it
    returns a tuple of ``sent`` and, if it is the last part, of the leaves of the model's output."""
    inputs: tuple[int, ...]
    """Which leaves of the model's input it takes."""
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True)
class Cut:
    """All parts of a model."""

    captured: Captured
    parts: tuple[Part, ...]
    tied: Mapping[str, tuple[int, ...]]
    """The parameters that several parts hold, by full name: which parts."""
