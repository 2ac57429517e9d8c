"""The graph that torch.export made, cleaned of what it adds, its tensors under their full names.

Taken out are assertions about dtypes and sizes, which do not hold under autocast (:class:`~.input_spec.InputSpec`
looks at inputs instead), and torch.export's own names for parameters (probed on torch 2.13).
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

CONSTANT = "_constant_"
"""How the names begin of tensors that the graph holds and the model does not name: ``torch.tensor(2.0)`` in forward."""
_BLOCK = "_block_"


def cleaned(
    program: ExportedProgram, module: nn.Module, names: list[str]
) -> tuple[Graph, dict[str, Any], dict[str, str]]:
    """A graph of its own, the tensors and blocks that it names, and whose each node is."""
    graph, new = Graph(), dict[Node, Node]()
    tensors, held, owners = dict[str, Any](), dict[str, Node](), dict[str, str]()
    lifted = _lifted(program, module)
    fresh = iter(identifiers(names))
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(tuple(new[made] for made in _outputs(program, node)))
        elif node.op == "placeholder" and node.name not in lifted:
            new[node] = graph.placeholder(next(fresh))
            new[node].meta = dict(node.meta)
            owners[new[node].name] = ""
        elif node.op == "placeholder":
            name, tensor = lifted[node.name]
            if name not in tensors:
                tensors[name], held[name] = tensor, graph.get_attr(name)
                held[name].meta = dict(node.meta)
                owners[held[name].name] = name.rpartition(".")[0]
            new[node] = held[name]
        elif node.op == "get_attr":
            name = f"{_BLOCK}{len(tensors)}"
            tensors[name] = _block(getattr(program.graph_module, node.target))
            new[node] = graph.get_attr(name)
            owners[new[node].name] = _owner(next(iter(node.users)))
        elif not _asserts(node):
            new[node] = graph.node_copy(node, new.__getitem__)
            owners[new[node].name] = _owner(node)
    remove_dead(graph)
    return graph, tensors, {node.name: owners[node.name] for node in graph.nodes if node.op != "output"}


def _lifted(program: ExportedProgram, module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Placeholder -> the name and tensor that it stands for; a tensor of several names has its first."""
    own = _all_tensors(module)
    first = {id(t): name for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    lifted: dict[str, tuple[str, Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        name = (spec.target or "").removeprefix("model.")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            lifted[spec.arg.name] = first[id(own[name])], own[name]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants = sum(name.startswith(CONSTANT) for name, _ in lifted.values())
            lifted[spec.arg.name] = f"{CONSTANT}{constants}", program.constants[spec.target]
    return lifted


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _outputs(program: ExportedProgram, node: Node) -> Iterator[Node]:
    made_all: Any = node.args[0]
    for made, spec in zip(made_all, program.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            yield made


def identifiers(names: list[str]) -> list[str]:
    """Names of arguments for the places of leaves.

    >>> identifiers([""]), identifiers(["['x']", "['m'][0]", "['m_0']"])
    (['inputs'], ['x', 'm_0', 'm_0_2'])
    """
    clean = [re.sub(r"\W+", "_", name).strip("_") or "inputs" for name in names]
    clean = [f"inputs_{name}" if name[0].isdigit() else name for name in clean]
    return [name if name not in clean[:i] else f"{name}_{i}" for i, name in enumerate(clean)]


_ASSERTIONS = ("aten::_assert", "aten::_functional_assert", "aten::sym_constrain", "aten::_functional_sym_constrain")


def _asserts(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target._schema.name).startswith(_ASSERTIONS)


def _block(block: GraphModule) -> GraphModule:
    """What runs under no_grad or another autocast, as one call."""
    for node in reversed(block.graph.nodes):
        if _asserts(node):
            block.graph.erase_node(node)
    for child in block.children():
        if isinstance(child, GraphModule):
            _block(child)
    remove_dead(block.graph)
    block.recompile()
    return block


def remove_dead(graph: Graph) -> None:
    """Take out what no output needs and nobody notices: neither a write nor a random number."""
    for node in reversed(graph.nodes):
        if not node.users and _unnoticed(node):
            graph.erase_node(node)


def _unnoticed(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", "") in ("_operator", "math")
    schema, tags = node.target._schema, node.target.tags
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags and "norm" not in schema.name


def _owner(node: Node) -> str:
    """The full name of the module that a node comes from; that of its last call where it is called several times."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    name = stack[-1] if stack else ""
    return re.sub(r"@\d+", "", name).removeprefix("model").removeprefix(".") if name.startswith("model") else ""
