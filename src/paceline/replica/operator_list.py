"""A traced graph of PyTorch's operators as a function that TorchScript's interpreter runs, without Python.

The interpreter calls one operator after another, with the arguments that were traced, and frees a tensor after its last
use. Nothing is fused or changed: the same operators in the same order make the same bits. There is no compiler; what is
built here is TorchScript's graph itself, operator by operator.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Argument, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from paceline.comm.shared_memory import ALIGNMENT
from paceline.core.errors import InputError
from paceline.core.types import Seconds

# Seconds of passes of one form before it is traced, which takes about as long: a short run is not held up.
WARM_S: Seconds = 0.05


class PlainSteps(NamedTuple):
    """Steps of one form, or a stage's passes, that were made without a graph.

    Args:
        number: of them.
        seconds: of all.
        shortest: of one.
    """

    number: int = 0
    seconds: Seconds = 0.0
    shortest: Seconds = math.inf

    def with_one(self, seconds: Seconds) -> "PlainSteps":
        """Return these and one more."""
        return PlainSteps(self.number + 1, self.seconds + seconds, min(self.shortest, seconds))


# Of tensors, those of a graph's inputs in their order.
Operators: TypeAlias = Callable[..., Sequence[Tensor]]

# TorchScript takes these by number, as c10::MemoryFormat has them.
_MEMORY_FORMATS: Mapping[object, int] = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}

_ATEN = torch.ops.aten
_DETACH, _T = _ATEN.detach.default, _ATEN.t.default
_VIEWS = {_ATEN.view.default, _ATEN._unsafe_view.default}

_CLONE, _COPY = _ATEN.clone.default, _ATEN.copy_.default

# Operators that can write their result into memory that they are given, as they write it into their own.
_WRITING = {_ATEN.mm.default: _ATEN.mm.out, _ATEN.sum.dim_IntList: _ATEN.sum.IntList_out}


def operators_of(module: GraphModule) -> tuple[Operators, list[Tensor]]:
    """Return a function of the inputs of a graph and then of the tensors that it holds itself, and those tensors.

    Args:
        module: of a trace; its outputs are a sequence of tensors. What has no effect is removed from it.

    Raises:
        InputError: it does something that TorchScript has no operator for.
    """
    simplify(module)
    builder, nodes = _GraphBuilder(), list(module.graph.nodes)
    constants = [node for node in nodes if node.op == "get_attr"]
    for node in [*(node for node in nodes if node.op == "placeholder"), *constants]:
        builder.add_input(node)
    for node in nodes:
        if node.op == "call_function":
            builder.add_call(node)
    (output,) = module.graph.find_nodes(op="output")
    results, drawn = list(output.args[0]), _drawn_for_nothing(nodes, output)
    made, own = builder.function([*results, *drawn]), [getattr(module, str(node.target)) for node in constants]
    if not drawn:
        return made, own
    # TorchScript leaves out an operator whose results nobody has, and later ones would draw its numbers.
    return lambda *inputs: made(*inputs)[: len(results)], own


def _drawn_for_nothing(nodes: Sequence[Node], output: Node) -> list[Node]:
    """Return the operators that draw random numbers on which no output depends."""
    needed, others = set[Node](), [output]
    while others:
        node = others.pop()
        if node not in needed:
            needed.add(node)
            others += node.all_input_nodes
    calls = [node for node in nodes if isinstance(node.target, OpOverload) and node not in needed]
    return [node for node in calls if torch.Tag.nondeterministic_seeded in node.target.tags]  # type: ignore[union-attr]


@contextmanager
def as_it_is() -> Iterator[None]:
    """Context manager for the first call of such a function: its graph is not optimised for later ones."""
    before = torch._C._jit_set_profiling_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_profiling_mode(before)


class _GraphBuilder:
    """Builds TorchScript's graph of a traced one."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._values: dict[Node, Any] = {}
        """A value for each node, or those of an operator that has several results."""

    def add_input(self, node: Node) -> None:
        """Add an input of the function."""
        self._values[node] = value = self._graph.addInput(node.name)
        value.setType(torch._C.TensorType.get())

    def add_call(self, node: Node) -> None:
        """Add the call of an operator, or what is one of its results."""
        target, given = node.target, node.args
        if target is operator.getitem:
            self._values[node] = self._values[given[0]][given[1]]  # type: ignore[index]
            return
        if not isinstance(target, OpOverload):
            raise InputError(f"it calls {target}, which is no operator of PyTorch's")
        schema = target._schema
        arguments = [_given(node, place, argument) for place, argument in enumerate(schema.arguments)]
        inputs = [self._value(each.type, value) for each, value in zip(schema.arguments, arguments, strict=True)]
        made, results = self._append(schema.name, inputs, [each.type for each in schema.returns])
        # TorchScript chooses the overload by the types of the values: another one where a number stands for a tensor.
        if made.schema().partition("(")[0] not in (str(schema).partition("(")[0], f"{schema.name}.Scalar"):
            raise InputError(f"TorchScript has no {target}")
        if len(results) == 1 and schema.returns[0].type.kind() == "ListType":
            of_tensors = [torch._C.TensorType.get()] * len(node.meta["val"])
            results = self._append("prim::ListUnpack", results, of_tensors)[1]
            self._values[node] = results
        else:
            self._values[node] = results[0] if len(results) == 1 else results

    def function(self, outputs: Sequence[Node]) -> Operators:
        """Return the function that returns these results, of an operator that has several the first."""
        found = [self._values[node] for node in outputs]
        values = [each[0] if isinstance(each, list) else each for each in found]
        tuple_type = torch._C.TupleType([value.type() for value in values])
        self._graph.registerOutput(*self._append("prim::TupleConstruct", values, [tuple_type])[1])
        self._graph.lint()
        made: Operators = torch._C._create_function_from_graph("operators", self._graph)
        return made

    def _append(self, name: str, inputs: Sequence[Any], types: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Append a call, whose results have these types; return it and them."""
        made = self._graph.appendNode(self._graph.create(name, inputs, len(types)))
        results = list(made.outputs())
        for result, kind in zip(results, types, strict=True):
            result.setType(kind)
        return made, results

    def _value(self, kind: Any, given: Any) -> Any:
        """Return the value of an argument of this type."""
        if isinstance(given, Node):
            return self._values[given]
        while given is not None and kind.kind() == "OptionalType":
            kind = kind.getElementType()
        if isinstance(given, (list, tuple)):
            each = kind.getElementType()
            items = [self._value(each, item) for item in given]
            return self._append("prim::ListConstruct", items, [torch._C.ListType(each)])[1][0]
        if given is not None and kind.kind() == "FloatType":
            given = float(given)
        return self._graph.insertConstant(_MEMORY_FORMATS.get(given, given))


def _given(node: Node, place: int, argument: Argument) -> Any:
    """Return what a call gives an operator's argument, or its default."""
    if place < len(node.args) and not argument.kwarg_only:
        return node.args[place]
    return node.kwargs.get(argument.name, argument.default_value)


def simplify(module: GraphModule) -> None:
    """Remove what has no effect: aliases for autograd, transpositions of transpositions, results that nobody uses."""
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=_DETACH):
        node.replace_all_uses_with(node.args[0])
    for node in graph.find_nodes(op="call_function", target=_T):
        source = node.args[0]
        if isinstance(source, Node) and source.target is _T:
            node.replace_all_uses_with(source.args[0])
    graph.eliminate_dead_code()


def write_outputs(module: GraphModule, places: Sequence[Tensor]) -> None:
    """Have a graph write its last outputs into tensors that become its last inputs, instead of returning them.

    Products and sums are computed where they belong, the others copied once; also those that would not begin at a
    cache line, as memory of their own does, for kernels round by alignment.

    Args:
        module: of a trace.
        places: tensors of the outputs' shapes and types, at addresses like those that it will be given.
    """
    graph = module.graph
    (output,), last = graph.find_nodes(op="output"), graph.find_nodes(op="placeholder")[-1]
    first = len(output.args[0]) - len(places)
    for number, place in enumerate(places, first):
        with graph.inserting_after(last):
            last = given = graph.placeholder(f"output_{number}")
        made = result = output.args[0][number]
        while made.target in _VIEWS:
            made = made.args[0]
        aligned = place.data_ptr() % ALIGNMENT == 0
        if made.target is not _CLONE and not (aligned and made.target in _WRITING):
            with graph.inserting_before(output):
                graph.call_function(_COPY, (given, result))
            continue
        with graph.inserting_before(made):
            if made is not result:
                given = graph.call_function(_ATEN.view.default, (given, list(made.meta["shape"])))
            if made.target is _CLONE:
                written = graph.call_function(_COPY, (given, made.args[0]))
            else:
                written = graph.call_function(_WRITING[made.target], made.args, {**made.kwargs, "out": given})
        made.replace_all_uses_with(written)
    output.args = (output.args[0][:first],)
