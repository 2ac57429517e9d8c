"""Which modules of a model are made whole one at a time, where no rank holds all of its parameters.

::

    model = Sequential(Embedding, Block, Block, ..., Linear)

    Embedding   a unit: gathered before its forward and let go after it; again so in backward
    Block       a unit, with all that is in it
    Linear      a unit
    model       the last unit: what is in no other

A unit must own what it gathers: no other module's forward may touch it. So a tied weight belongs to the smallest unit
that holds all its places, and torch's MultiheadAttention, which reads the weight of a member without calling it, is
never cut. It is no unit either: it returns a view, and torch 2.13 warns that a unit's view must not be written.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others: their members are the layers of a model, in which it is natural to cut it."""

_WHOLE = (nn.MultiheadAttention,)
"""Modules that stay as they are within the unit around them."""

LAYER = 1 / 256
"""Of all parameters: what a member of a list holds at least, for a gather of its own to be worth while."""

LARGE = 1 / 8
"""Of all parameters: what any other module holds at least."""


def units(module: nn.Module) -> list[nn.Module]:
    """The units of a module, those inside others before these; the last is the module itself.

    A member of a list that holds 1/256 of all bytes, and any other module that holds 1/8, is a unit, if forward of no
    module outside can read its parameters. What is inside it and a unit already does not count.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Linear', 'Sequential']
    >>> model[2].weight = nn.Linear(8, 3).weight
    >>> model.append(nn.Linear(8, 3))[3].weight = model[2].weight          # tied: only the whole holds both places
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Sequential']
    """
    places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    total = sum(p.nbytes for p in module.parameters())
    covered: set[int] = set()
    found = []
    for inner, member in _inside(module):
        own = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False) if id(p) not in covered)
        nbytes = sum(p.nbytes for p in inner.parameters() if id(p) in own)
        alone = all(places[key] == count for key, count in own.items())
        if alone and own and nbytes >= total * (LAYER if member else LARGE):
            found.append(inner)
            covered.update(own)
    return [*found, module]


def _inside(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """All modules in it that have a forward of their own, children first, and whether each is a member of a list."""
    seen = set() if seen is None else seen
    for child in module.children():
        if id(child) not in seen and not isinstance(child, _WHOLE):
            seen.add(id(child))
            yield from _inside(child, seen)
            if type(child).forward is not nn.Module.forward and not isinstance(child, _LISTS):
                yield child, isinstance(module, _LISTS)
