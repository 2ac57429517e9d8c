"""Trees apart from their tensors: how the leaves of an input are found, and how an output is put together again."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from paceline.core.errors import InputError
from paceline.program import Tree, map_tree

Rebuild = Callable[[Sequence[Tensor]], Tree]


class Slot:
    """Where a tensor was."""

    def __repr__(self) -> str:
        return "a tensor"


SLOT = Slot()


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an input in the order of :func:`paceline.program.leaves`, each with its place in the tree.

    >>> import torch
    >>> [name for name, _ in named_leaves({"x": torch.ones(1), "masks": (torch.ones(1), None)})]
    ["['x']", "['masks'][0]"]
    """
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from named_leaves(value, f"{name}[{index}]")


def matched(outline: Tree, tree: Tree, name: str = "") -> Iterator[Tensor]:
    """The tensors of ``tree`` in the order in which ``outline`` has its slots, whatever the order of its keys.

    Raises:
        InputError: where the tree has another form, or another value where it has no tensor.
    """
    if isinstance(outline, Slot):
        if not isinstance(tree, Tensor):
            _refuse(name, outline, tree)
        yield tree
    elif isinstance(outline, Mapping):
        if not isinstance(tree, Mapping) or tree.keys() != outline.keys():
            _refuse(name, sorted(map(str, outline)), sorted(map(str, tree)) if isinstance(tree, Mapping) else tree)
        for key, value in outline.items():
            yield from matched(value, tree[key], f"{name}[{key!r}]")
    elif isinstance(outline, (tuple, list)):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(outline):
            _refuse(name, outline, tree)
        for index, value in enumerate(outline):
            yield from matched(value, tree[index], f"{name}[{index}]")
    elif isinstance(tree, Tensor) or type(tree) is not type(outline) or tree != outline:
        _refuse(name, outline, tree)


def _refuse(name: str, expected: object, found: object) -> NoReturn:
    found = map_tree(lambda _: SLOT, found)
    raise InputError(
        f"input{name} is {found!r}, where the model was captured with {expected!r}; give every batch the same form, "
        "keys and values that are no tensors, or write the model as an nn.Sequential, whose children run as they are"
    )


class Dropped:
    """What stands in an output where the model returned an object that is no tree: a cache, say."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"the model returns a {self._kind}, whose {name!r} is not in its graph: outputs are tensors, and tuples, "
            "lists, dicts and dataclasses of them; let forward return the tensors that the loss needs"
        )


def taken_apart(tree: Tree, found: list[Tensor]) -> Rebuild:
    """Add the tensors of an output to ``found``; what is returned puts them, or others in their places, back.

    Mappings and dataclasses keep their type, as does ``transformers.utils.ModelOutput``, which is both.

    >>> import torch
    >>> found = []
    >>> rebuild = taken_apart({"a": (torch.ones(2), "text")}, found)
    >>> rebuild([t + 1 for t in found])
    {'a': (tensor([2., 2.]), 'text')}
    """
    if isinstance(tree, Tensor):
        index = len(found)
        found.append(tree)
        return lambda leaves: leaves[index]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _fields(tree, found)
    if isinstance(tree, Mapping):
        items = {key: taken_apart(value, found) for key, value in tree.items()}
        kind: Any = type(tree)
        return lambda leaves: kind({key: make(leaves) for key, make in items.items()})
    if isinstance(tree, (tuple, list)):
        return _sequence(tree, found)
    if isinstance(tree, _PLAIN):
        return lambda _: tree
    dropped = Dropped(type(tree).__name__)
    return lambda _: dropped


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _fields(tree: Any, found: list[Tensor]) -> Rebuild:
    kind = type(tree)
    fields = {f.name: taken_apart(getattr(tree, f.name), found) for f in dataclasses.fields(tree) if f.init}
    return lambda leaves: kind(**{name: make(leaves) for name, make in fields.items()})


def _sequence(tree: Any, found: list[Tensor]) -> Rebuild:
    items = [taken_apart(value, found) for value in tree]
    kind: Any = type(tree)
    if hasattr(tree, "_fields"):
        return lambda leaves: kind(*(make(leaves) for make in items))
    return lambda leaves: kind([make(leaves) for make in items])
