"""Replace operators that write into a tensor by those that return a new one: it is these that have rules.

::

    y = conv(x)                y = conv(x)
    y.add_(x)                  a = add(y, x)
    relu_(y)            ->     b = relu(a)
    fc(y)                      fc(b)

``op_(y, ...)`` becomes ``op(y, ...)``, and later users of y use its result, where no difference can be observed:

- op takes the same arguments, writes into none, and returns a tensor of the same type, shape and order in memory;
- y is made by the graph and shares no memory with a parameter, a buffer or an input: their owners see what is
  written into them after the model has run;
- what else shares y's memory, its views and what it is a view of, is not used afterwards.

Anything else stays as it is. Which tensors share memory is known from the run in which the graph was captured.
"""

from collections.abc import Iterator
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import SymBool, Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from paceline.replica.tensor.base import aten, nodes_in, rule_of

# Operators of which both forms draw the same random numbers on the CPU.
_SAME_DRAWS = (aten.dropout_.default,)


def functionalize(module: GraphModule) -> None:
    """Replace the operators that write in place where that is the same; nodes keep their names and metadata."""
    graph = module.graph
    positions = {node: position for position, node in enumerate(graph.nodes)}
    aliases, written_to = _aliases(module), dict[Node, Node]()
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        infos = [argument.alias_info for argument in target._schema.arguments]
        if not infos or infos[0] is None or not infos[0].is_write or any(infos[1:]):  # it writes into the first alone
            continue
        written: Any = node.args[0] if node.args else None
        if not isinstance(written, Node):
            continue
        # Nodes that are this very tensor, as what has written into it returns it.
        root = written_to.get(written, written)
        same = [each for each in aliases[written] if written_to.get(each, each) is root]
        functional = _functional_form(target)
        if (
            functional is None
            or not _is_unobserved(module, node, same, aliases[node], positions)
            or not _gives_the_same(node, functional)
        ):
            written_to[node] = root
            continue
        node.target = functional
        for other in same:
            for user in [user for user in other.users if positions[user] > positions[node]]:
                user.replace_input_with(other, node)
    module.recompile()


def _functional_form(target: OpOverload) -> OpOverload | None:
    """Return the operator that returns what this one writes, if there is a rule for it."""
    schema = target._schema
    if torch.Tag.inplace_view in target.tags or not schema.name.startswith("aten::") or not schema.name.endswith("_"):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags and target not in _SAME_DRAWS:
        return None
    packet = getattr(aten, schema.name.removeprefix("aten::")[:-1], None)
    form = getattr(packet, target._overloadname, None)
    if not isinstance(form, OpOverload) or rule_of(form) is None or _signature(form) != _signature(target):
        return None
    aliased = any(each.alias_info is not None for each in (*form._schema.arguments, *form._schema.returns))
    return None if aliased or len(form._schema.returns) != 1 else form


def _signature(target: OpOverload) -> list[tuple[Any, ...]]:
    """Return what an operator takes; its first argument may be named ``self`` or ``input``."""
    first, *others = target._schema.arguments
    rest = [(each.name, str(each.type), each.kwarg_only, each.default_value) for each in others]
    return [(str(first.type), first.kwarg_only), *rest]


def _is_unobserved(
    module: GraphModule, node: Node, same: list[Node], sharing: set[Node], positions: dict[Node, int]
) -> bool:
    """Return True if only nodes that will use the new result could have seen the write."""
    for each in sharing:  # memory of the model or of its caller outlives the graph
        is_tensor = each.op == "get_attr" and isinstance(attrgetter(str(each.target))(module), Tensor)
        if each.op == "placeholder" or is_tensor:
            return False
    others = [each for each in node.all_input_nodes if each in sharing and each is not node.args[0]]
    if any(each not in same for each in others):
        return False
    # Only pointwise operators may read the tensor that they write through another argument.
    repeated = others or nodes_in((node.args, node.kwargs)).count(node.args[0]) > 1  # type: ignore[arg-type]
    if repeated and torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return False
    earlier = (each for each in sharing.difference(same) if positions[each] < positions[node])
    return not any(positions[user] > positions[node] for each in earlier for user in each.users)


def _gives_the_same(node: Node, form: OpOverload) -> bool:
    """Return True if the functional form's result has the same type, shape and order in memory."""
    before: Any = node.args[0]
    written = before.meta.get("val")
    if not isinstance(written, FakeTensor):
        return False
    if torch.Tag.nondeterministic_seeded in form.tags and written.device.type != "cpu":
        return False
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with written.fake_mode, torch.no_grad():
            result = form(*args, **kwargs)
    except Exception:
        return False
    if result.dtype != written.dtype or result.dim() != written.dim():
        return False
    pairs = zip((*result.shape, *result.stride()), (*written.shape, *written.stride()), strict=True)
    return all(_is_known(a == b) for a, b in pairs)


def _is_known(condition: bool | SymBool) -> bool:
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # with SymPy, which takes long to import

    return statically_known_true(condition)


def _aliases(module: GraphModule) -> dict[Node, set[Node]]:
    """Return the nodes that may share memory with each node, itself included."""
    aliases: dict[Node, set[Node]] = {}
    last_with: dict[int, Node] = {}
    for node in module.graph.nodes:
        aliases[node] = {node}
        results = node.meta.get("val")
        results = results if isinstance(results, (list, tuple)) else [results]
        storages = [each.untyped_storage()._cdata for each in results if isinstance(each, Tensor)]
        for other in (*(last_with[each] for each in storages if each in last_with), *_aliased_inputs(node)):
            if aliases[other] is not aliases[node]:
                aliases[other].update(aliases[node])
                aliases.update(dict.fromkeys(aliases[node], aliases[other]))
        last_with.update(dict.fromkeys(storages, node))
    return aliases


def _aliased_inputs(node: Node) -> Iterator[Node]:
    """Yield the inputs that a schema says share memory with the result; all inputs where there is no schema."""
    target = node.target
    if node.op == "call_function" and isinstance(target, OpOverload) and "val" in node.meta:
        for index, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None:
                yield from nodes_in(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
        return
    on_sizes = target is not getitem and getattr(target, "__module__", "") in ("_operator", "math")
    if node.op == "call_module" or (node.op == "call_function" and not on_sizes):
        yield from node.all_input_nodes
