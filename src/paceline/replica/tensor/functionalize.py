"""Operators that write into a tensor, as those that make another one: it is these that have rules.

::

    y = conv(x)                y = conv(x)
    y.add_(x)                  a = add(y, x)
    relu_(y)            ->     b = relu(a)
    fc(y)                      fc(b)

``op_(y, ...)`` becomes ``op(y, ...)``, and what used y afterwards uses that, where nobody can tell. So it is if

- op takes the same arguments, writes into none, and makes a tensor of the same type, shape and order in memory;
- y is made by the graph and shares no memory with a parameter, a buffer or an input: whoever holds those sees what is
  written into them after the model has run;
- what else shares y's memory, its views and what it is a view of, is not used afterwards.

Anything else stays as it is. Which tensors share memory is known from the run in which the graph was captured.
"""

from collections.abc import Iterator
from operator import attrgetter, getitem
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from paceline.replica.tensor.base import rule_of

aten = torch.ops.aten

_DRAWS_ALIKE = (aten.dropout_.default,)
"""On the CPU both forms draw the same random numbers."""

_Memories: TypeAlias = dict[Node, set[Node]]
"""Of each node: all that may share memory with it, itself included."""


def functionalize(module: GraphModule) -> None:
    """Replace what can be; nodes keep their names, and what they are known by."""
    graph = module.graph
    places = {node: place for place, node in enumerate(graph.nodes)}
    memories, same = _memories(module), dict[Node, Node]()
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload) or not _writes(target):
            continue
        written: Any = node.args[0] if node.args else None
        if not isinstance(written, Node):
            continue
        twin, alike = _twin(target), _alike(written, memories, same)
        if twin is None or not _unseen(module, node, alike, memories, places) or not _makes_the_same(node, twin):
            same[node] = same.get(written, written)
            continue
        node.target = twin
        for other in alike:
            for user in [user for user in other.users if places[user] > places[node]]:
                user.replace_input_with(other, node)
    module.recompile()


def _writes(target: OpOverload) -> bool:
    """Into its first argument, which it gives back, and into no other."""
    infos = [argument.alias_info for argument in target._schema.arguments]
    return bool(infos) and infos[0] is not None and infos[0].is_write and not any(infos[1:])


def _twin(target: OpOverload) -> OpOverload | None:
    """The operator that makes what this one writes, where there is a rule for it."""
    schema = target._schema
    if torch.Tag.inplace_view in target.tags or not schema.name.startswith("aten::") or not schema.name.endswith("_"):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags and target not in _DRAWS_ALIKE:
        return None
    packet = getattr(aten, schema.name.removeprefix("aten::")[:-1], None)
    twin = getattr(packet, target._overloadname, None)
    if not isinstance(twin, OpOverload) or rule_of(twin) is None or _asked(twin) != _asked(target):
        return None
    own = twin._schema
    aliased = any(each.alias_info is not None for each in (*own.arguments, *own.returns))
    return None if aliased or len(own.returns) != 1 else twin


def _asked(target: OpOverload) -> list[tuple[Any, ...]]:
    """What it takes; the first may have another name, ``self`` or ``input``."""
    first, *others = target._schema.arguments
    told = [(each.name, str(each.type), each.kwarg_only, each.default_value) for each in others]
    return [(str(first.type), first.kwarg_only), *told]


def _alike(written: Node, memories: _Memories, same: dict[Node, Node]) -> list[Node]:
    """The nodes that are this very tensor, as what has written into it gives it back."""
    root = same.get(written, written)
    return [node for node in memories[written] if same.get(node, node) is root]


def _unseen(module: GraphModule, node: Node, alike: list[Node], memories: _Memories, places: dict[Node, int]) -> bool:
    """Whether nothing but what is told to use the result could have seen the write."""
    sharing = memories[node]
    if any(_held(module, each) for each in sharing):
        return False
    given = [each for each in node.all_input_nodes if each in sharing and each is not node.args[0]]
    if any(each not in alike for each in given):
        return False
    repeated = given or _nodes((node.args, node.kwargs)).count(node.args[0]) > 1  # type: ignore[arg-type]
    if repeated and torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return False
    others = (each for each in sharing.difference(alike) if places[each] < places[node])
    return not any(places[user] > places[node] for each in others for user in each.users)


def _held(module: GraphModule, node: Node) -> bool:
    """By the model or its caller."""
    if node.op == "get_attr":
        return isinstance(attrgetter(str(node.target))(module), Tensor)
    return node.op == "placeholder"


def _makes_the_same(node: Node, twin: OpOverload) -> bool:
    """Whether the twin's tensor is one of the same type, shape and order in memory."""
    before: Any = node.args[0]
    written = before.meta.get("val")
    if not isinstance(written, FakeTensor):
        return False
    if torch.Tag.nondeterministic_seeded in twin.tags and written.device.type != "cpu":
        return False
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with written.fake_mode, torch.no_grad():
            made = twin(*args, **kwargs)
    except Exception:
        return False
    if made.dtype != written.dtype or made.dim() != written.dim():
        return False
    pairs = zip((*made.shape, *made.stride()), (*written.shape, *written.stride()), strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _memories(module: GraphModule) -> _Memories:
    found: _Memories = {}
    stored: dict[int, Node] = {}
    for node in module.graph.nodes:
        found[node] = {node}
        storages = list(_storages(node.meta.get("val")))
        for other in (*(stored[each] for each in storages if each in stored), *_sources(node)):
            if found[other] is not found[node]:
                found[other].update(found[node])
                found.update(dict.fromkeys(found[node], found[other]))
        stored.update(dict.fromkeys(storages, node))
    return found


def _storages(made: Any) -> Iterator[int]:
    for each in made if isinstance(made, (list, tuple)) else [made]:
        if isinstance(each, Tensor):
            yield each.untyped_storage()._cdata


def _sources(node: Node) -> Iterator[Node]:
    """What it says itself to share memory with; all that it takes, where it says nothing of it."""
    target = node.target
    if node.op == "call_function" and isinstance(target, OpOverload) and "val" in node.meta:
        for index, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None:
                given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                yield from _nodes(given)
    elif node.op == "call_module" or (node.op == "call_function" and not _counts(target)):
        yield from node.all_input_nodes


def _nodes(given: Any) -> list[Node]:
    found = list[Node]()
    map_arg(given, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found


def _counts(target: Any) -> bool:
    """Whether it is arithmetic on sizes."""
    return target is not getitem and getattr(target, "__module__", "") in ("_operator", "math")
