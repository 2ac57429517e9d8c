"""Trees of tensors, and the inputs that a captured graph takes: leaves, dtypes, and the dims that tracing has fixed."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import InputError
from paceline.program import Tree, leaves, map_tree

Rebuild = Callable[[Sequence[Tensor]], Tree]

# Shapes and dtypes of the leaves of an input: where they are equal, all that is computed of it has equal shapes.
Shapes: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]


class TreeLeaf:
    """The place of a tensor in an outline."""

    def __repr__(self) -> str:
        return "a tensor"


LEAF = TreeLeaf()


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an input in the order of :func:`paceline.program.leaves`, each after its place in the tree.

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


def leaves_like(outline: Tree, tree: Tree, name: str = "") -> Iterator[Tensor]:
    """Yield the tensors of ``tree`` in the order of the leaves of ``outline``, whatever the order of its keys.

    Raises:
        InputError: the tree has another form, or another value where it has no tensor.
    """
    if isinstance(outline, TreeLeaf):
        if not isinstance(tree, Tensor):
            _refuse(name, outline, tree)
        yield tree
    elif isinstance(outline, Mapping):
        if not isinstance(tree, Mapping) or tree.keys() != outline.keys():
            _refuse(name, sorted(map(str, outline)), sorted(map(str, tree)) if isinstance(tree, Mapping) else tree)
        for key, value in outline.items():
            yield from leaves_like(value, tree[key], f"{name}[{key!r}]")
    elif isinstance(outline, (tuple, list)):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(outline):
            _refuse(name, outline, tree)
        for index, value in enumerate(outline):
            yield from leaves_like(value, tree[index], f"{name}[{index}]")
    elif isinstance(tree, Tensor) or type(tree) is not type(outline) or tree != outline:
        _refuse(name, outline, tree)


def _refuse(name: str, expected: object, given: object) -> NoReturn:
    given = map_tree(lambda _: LEAF, given)
    raise InputError(
        f"input{name} is {given!r}, where the model was captured with {expected!r}; give every batch the same form, "
        "keys and values that are no tensors, or write the model as an nn.Sequential, whose children run as they are"
    )


class DroppedOutput:
    """Stands in an output for an object that is no tree (a cache, say), which a graph does not return."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"the model returns a {self._kind}, whose {name!r} is not in its graph: outputs are tensors, and tuples, "
            "lists, dicts and dataclasses of them; let forward return the tensors that the loss needs"
        )


def flatten_tree(tree: Tree, tensors: list[Tensor]) -> Rebuild:
    """Append the tensors of an output to ``tensors``; returns a function that puts them, or others, in their places.

    Mappings and dataclasses keep their type, as does ``transformers.utils.ModelOutput``, which is both.

    >>> import torch
    >>> tensors = []
    >>> rebuild = flatten_tree({"a": (torch.ones(2), "text")}, tensors)
    >>> rebuild([t + 1 for t in tensors])
    {'a': (tensor([2., 2.]), 'text')}
    """
    kind: Any = type(tree)
    if isinstance(tree, Tensor):
        index = len(tensors)
        tensors.append(tree)
        return lambda leaves: leaves[index]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: flatten_tree(getattr(tree, f.name), tensors) for f in dataclasses.fields(tree) if f.init}
        return lambda leaves: kind(**{name: build(leaves) for name, build in fields.items()})
    if isinstance(tree, Mapping):
        values = {key: flatten_tree(value, tensors) for key, value in tree.items()}
        return lambda leaves: kind({key: build(leaves) for key, build in values.items()})
    if isinstance(tree, (tuple, list)):
        items = [flatten_tree(value, tensors) for value in tree]
        if hasattr(tree, "_fields"):  # a namedtuple
            return lambda leaves: kind(*(build(leaves) for build in items))
        return lambda leaves: kind([build(leaves) for build in items])
    if isinstance(tree, (type(None), bool, int, float, complex, str, bytes)):
        return lambda _: tree
    dropped = DroppedOutput(kind.__name__)
    return lambda _: dropped


# A fixed size, or the name of a size that may change; dims of one name have one size.
Dim = int | str


@dataclass(frozen=True)
class LeafSpec:
    """One tensor of an input.

    Args:
        name: its place, as it is written after ``input``: ``['mask']``, ``[0]``.
        dims: None: any shape is right.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[Dim, ...] | None


@dataclass(frozen=True)
class Branch:
    """A decision of the model that depends on sizes and was made when it was captured.

    Args:
        rule: a sympy expression over the names of dims that must hold.
    """

    rule: Any
    line: str


@dataclass(frozen=True)
class InputSpec:
    """The inputs that a captured model takes.

    Args:
        fixed: size -> why it is fixed, as the line of the model that has fixed it, as far as that is known.
        smallest: the least number of samples in a batch.
    """

    outline: Tree
    leaves: tuple[LeafSpec, ...]
    branches: tuple[Branch, ...] = ()
    fixed: Mapping[int, str] = field(default_factory=dict[int, str])
    smallest: int = 1
    _checked: set[tuple[Any, ...]] = field(default_factory=set, init=False, compare=False, repr=False)

    @classmethod
    def unconstrained(cls, inputs: Tree) -> "InputSpec":
        """Return the spec of a model that takes tensors of any size."""
        named = named_leaves(_as_arguments(inputs))
        return cls(outline_of(inputs), tuple(LeafSpec(name, tensor.dtype, None) for name, tensor in named))

    def flatten(self, inputs: Tree) -> list[Tensor]:
        """Return the leaves of an input in the graph's order.

        Raises:
            InputError: the graph can't take it; names the leaf and the dim.
        """
        tensors = list(leaves_like(self.outline, _as_arguments(inputs)))
        shapes = tuple((t.dtype, t.shape) for t in tensors)
        if shapes in self._checked:
            return tensors
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            if tensor.dtype != leaf.dtype:
                raise InputError(
                    f"input{leaf.name} is of {tensor.dtype}, but the model was captured with {leaf.dtype}; write "
                    f"input{leaf.name}.to({leaf.dtype}) where the data are made"
                )
            if leaf.dims is not None and tensor.dim() != len(leaf.dims):
                raise InputError(
                    f"input{leaf.name} has {tensor.dim()} dims, {tuple(tensor.shape)}, but the model was captured with "
                    f"{len(leaf.dims)}; give every batch as many"
                )
            for index, (size, dim) in enumerate(zip(tensor.shape, leaf.dims or (), strict=False)):
                place = f"dim {index} of input{leaf.name}"
                if isinstance(dim, int):
                    if size != dim:
                        why = self.why_fixed(dim)
                        raise InputError(f"{place} is {size}, but {why}; pad the inputs to {dim}, or {_AS_IS}")
                elif sizes.setdefault(dim, size) != size:
                    raise InputError(
                        f"{place} is {size} and {first[dim]} is {sizes[dim]}, but the model's graph holds only where "
                        f"they are equal; pad the inputs, or {_AS_IS}"
                    )
                else:
                    first.setdefault(dim, place)
        samples = next((len(t) for t in tensors if t.dim()), self.smallest)
        if samples < self.smallest:
            raise InputError(
                f"a batch of {samples} samples: the model does something else with it than with {self.smallest} or "
                f"more, for which it was captured; give every batch, and every micro-batch, at least {self.smallest}, "
                f"or {_AS_IS}"
            )
        for branch in self.branches:
            symbols = branch.rule.free_symbols
            if not branch.rule.subs({symbol: sizes[str(symbol)] for symbol in symbols}):
                names = sorted(map(str, symbols))
                raise InputError(
                    f"{branch.line} decides by sizes, and the model was captured where {branch.rule} holds, with "
                    + ", ".join(f"{name} = {first[name]}" for name in names)
                    + f", which is {' and '.join(str(sizes[name]) for name in names)} here; pad the inputs to sizes "
                    f"for which it holds, or {_AS_IS}"
                )
        self._checked.add(shapes)
        return tensors

    def why_fixed(self, size: int) -> str:
        """Return the reason, for a message, why tracing has fixed a dim at this size."""
        reason = f": {self.fixed[size]}" if size in self.fixed else ""
        return f"the model's graph holds for {size} alone{reason}"


_AS_IS = "write the model as an nn.Sequential, whose children run as they are"


def outline_of(inputs: Tree) -> Tree:
    """Return an input with :data:`LEAF` in place of its tensors."""
    return map_tree(lambda _: LEAF, _as_arguments(inputs))


def _as_arguments(inputs: Tree) -> Tree:
    """Return a list of arguments as a tuple, as which the model is called."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


def shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    """Return the shapes and dtypes of the leaves of an input."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])  # a generator takes twice as long


def varying_dims(inputs: Tree, others: Iterable[Tree]) -> list[set[int]]:
    """Return for each leaf of an input the dims whose size is another one in another input of the same form.

    >>> varying_dims((torch.ones(2, 5), torch.ones(3)), [(torch.ones(2, 7), torch.ones(3))])
    [{1}, set()]
    """
    own = leaves(inputs)
    varying: list[set[int]] = [set() for _ in own]
    for other in map(leaves, others):
        for found, leaf, like in zip(varying, own, other, strict=False):
            found.update(
                dim for dim, sizes in enumerate(zip(leaf.shape, like.shape, strict=False)) if len({*sizes}) > 1
            )
    return varying


def batch_size(inputs: Tree) -> int:
    """Return the number of samples: the size of dim 0 of an input's first tensor that has dims.

    Raises:
        InputError: there is none.
    """
    for leaf in leaves(inputs):
        if leaf.dim() and len(leaf):
            return len(leaf)
    raise InputError("the input has no tensor with samples along dim 0; give a batch of at least one sample")


def resized(inputs: Tree, samples: int) -> Tree:
    """Return an input with this many samples, its own repeated as needed; tensors without samples stay.

    >>> resized((torch.arange(2), torch.tensor(7)), 3)
    (tensor([0, 1, 0]), tensor(7))
    """
    batch = batch_size(inputs)
    rows = torch.arange(samples) % batch
    return map_tree(lambda t: t[rows.to(t.device)] if t.dim() and len(t) == batch else t, inputs)
