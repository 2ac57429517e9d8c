"""Trees of tensors, and what a captured graph takes: leaves, dtypes, dims fixed by tracing.

What a captured graph takes: the leaves of an input, their dtypes, and the dims that tracing has fixed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.program import Tree, leaves, map_tree

Rebuild = Callable[[Sequence[Tensor]], Tree]


class TreeLeaf:
    """Where a tensor was."""

    def __repr__(self) -> str:
        return "a tensor"


SLOT = TreeLeaf()


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
    if isinstance(outline, TreeLeaf):
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


Dim = int | str
"""A fixed size, or the name of a size that may change; dims of one name have one size."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of an input."""

    name: str
    """Its place, as it is written after ``input``: ``['mask']``, ``[0]``."""
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None
    """None: anything goes."""


@dataclass(frozen=True)
class Branch:
    """A decision of the model that depends on sizes and was made when it was captured."""

    rule: Any
    """A sympy expression over the names of dims that must hold."""
    where: str

    @property
    def names(self) -> list[str]:
        """Of the dims that decide."""
        return sorted(map(str, self.rule.free_symbols))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes decide alike."""
        return bool(self.rule.subs({symbol: sizes[str(symbol)] for symbol in self.rule.free_symbols}))


@dataclass(frozen=True)
class InputSpec:
    """The form of the inputs of a captured model."""

    outline: Tree
    leaves: tuple[Leaf, ...]
    branches: tuple[Branch, ...] = ()
    fixed: Mapping[int, str] = field(default_factory=dict[int, str])
    """Size -> the line of the model that has fixed it, as far as that is known."""
    smallest: int = 1
    """Samples that a batch has to have."""
    _seen: set[tuple[Any, ...]] = field(default_factory=set, init=False, compare=False, repr=False)

    def flatten(self, inputs: Tree) -> list[Tensor]:
        """The leaves of an input in the graph's order; raises InputError where the graph can't take them."""
        found = list(matched(self.outline, _as_called(inputs)))
        shapes = tuple((t.dtype, t.shape) for t in found)
        if shapes not in self._seen:
            self._check(found)
            self._seen.add(shapes)
        return found

    def _check(self, found: Sequence[Tensor]) -> None:
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}
        for leaf, tensor in zip(self.leaves, found, strict=True):
            if tensor.dtype != leaf.dtype:
                raise InputError(
                    f"input{leaf.name} is of {tensor.dtype}, but the model was captured with {leaf.dtype}; write "
                    f"input{leaf.name}.to({leaf.dtype}) where the data are made"
                )
            if leaf.dims is not None:
                self._check_dims(leaf, tensor, leaf.dims, sizes, first)
        samples = next((len(t) for t in found if t.dim()), self.smallest)
        if samples < self.smallest:
            raise InputError(
                f"a batch of {samples} samples: the model does something else with it than with {self.smallest} or "
                f"more, for which it was captured; give every batch, and every micro-batch, at least {self.smallest}, "
                f"or {_AS_IS}"
            )
        for branch in self.branches:
            if not branch.holds(sizes):
                raise InputError(
                    f"{branch.where} decides by sizes, and the model was captured where {branch.rule} holds, with "
                    + ", ".join(f"{name} = {first[name]}" for name in branch.names)
                    + f", which is {' and '.join(str(sizes[name]) for name in branch.names)} here; pad the inputs to "
                    f"sizes for which it holds, or {_AS_IS}"
                )

    def _check_dims(
        self, leaf: Leaf, tensor: Tensor, dims: tuple[Dim, ...], sizes: dict[str, int], first: dict[str, str]
    ) -> None:
        if tensor.dim() != len(dims):
            raise InputError(
                f"input{leaf.name} has {tensor.dim()} dims, {tuple(tensor.shape)}, but the model was captured with "
                f"{len(dims)}; give every batch as many"
            )
        for index, (size, dim) in enumerate(zip(tensor.shape, dims, strict=True)):
            place = f"dim {index} of input{leaf.name}"
            if isinstance(dim, int) and size != dim:
                raise InputError(f"{place} is {size}, but {self.why_fixed(dim)}; pad the inputs to {dim}, or {_AS_IS}")
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise InputError(
                    f"{place} is {size} and {first[dim]} is {sizes[dim]}, but the model's graph holds only where they "
                    f"are equal; pad the inputs, or {_AS_IS}"
                )
            if isinstance(dim, str):
                first.setdefault(dim, place)

    def why_fixed(self, size: int) -> str:
        """What is said of a dim that tracing has fixed at this size."""
        line = f": {self.fixed[size]} takes it for a number" if size in self.fixed else ""
        return f"the model's graph holds for {size} alone{line}"


_AS_IS = "write the model as an nn.Sequential, whose children run as they are"


def free_form(inputs: Tree) -> InputSpec:
    """The form of a model that takes tensors of any size."""
    named = named_leaves(_as_called(inputs))
    return InputSpec(outline_of(inputs), tuple(Leaf(name, tensor.dtype, None) for name, tensor in named))


def outline_of(inputs: Tree) -> Tree:
    """An input with its tensors left out."""
    return map_tree(lambda _: SLOT, _as_called(inputs))


def _as_called(inputs: Tree) -> Tree:
    """A list of arguments is called as a tuple is."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


def batch_size(inputs: Tree) -> int:
    """The number of samples: the size of dim 0 of an input's first tensor that has dims.

    Raises:
        InputError: where there is none.
    """
    for leaf in leaves(inputs):
        if leaf.dim() and len(leaf):
            return len(leaf)
    raise InputError("the input has no tensor with samples along dim 0; give a batch of at least one sample")


def resized(inputs: Tree, samples: int) -> Tree:
    """An input with this many samples: as many of its own, repeated as far as needed; what has no samples stays.

    >>> resized((torch.arange(2), torch.tensor(7)), 3)
    (tensor([0, 1, 0]), tensor(7))
    """
    batch = batch_size(inputs)
    rows = torch.arange(samples) % batch
    return map_tree(lambda t: t[rows.to(t.device)] if t.dim() and len(t) == batch else t, inputs)
