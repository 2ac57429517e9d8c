"""Clean-up of the graph that torch.export returns: its tensors under their full names, its assertions removed.

Removed are assertions about dtypes and sizes, which do not hold under autocast (:class:`~.input_spec.InputSpec` checks
inputs instead), and torch.export's own names for parameters (probed on torch 2.13).
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

CONSTANT = "_constant_"
"""Prefix of tensors that the graph holds and the model does not name: ``torch.tensor(2.0)`` in forward."""
_ASSERTIONS = ("aten::_assert", "aten::_functional_assert", "aten::sym_constrain", "aten::_functional_sym_constrain")


def clean_graph(
    program: ExportedProgram, module: nn.Module, names: list[str]
) -> tuple[Graph, dict[str, Any], dict[str, str]]:
    """Return a graph of its own, the tensors and blocks that it names, and each node's module.

    Args:
        program: of torch.export.
        module: that was exported.
        names: places of the input's leaves.
    """
    graph, copy_of = Graph(), dict[Node, Node]()
    tensors, read, owners = dict[str, Any](), dict[str, Node](), dict[str, str]()
    lifted = _lifted(program, module)
    arguments = iter(identifiers(names))
    for node in program.graph.nodes:
        if node.op == "output":
            pairs = zip(node.args[0], program.graph_signature.output_specs, strict=True)
            graph.output(tuple(copy_of[out] for out, spec in pairs if spec.kind is OutputKind.USER_OUTPUT))
        elif node.op == "placeholder" and node.name not in lifted:
            copy = copy_of[node] = graph.placeholder(next(arguments))
            copy.meta = dict(node.meta)
            owners[copy.name] = ""
        elif node.op == "placeholder":
            name, tensor = lifted[node.name]
            if name not in tensors:
                tensors[name], read[name] = tensor, graph.get_attr(name)
                read[name].meta = dict(node.meta)
                owners[read[name].name] = name.rpartition(".")[0]
            copy_of[node] = read[name]
        elif node.op == "get_attr":
            name = f"_block_{len(tensors)}"
            tensors[name] = _clean_block(getattr(program.graph_module, node.target))
            copy_of[node] = graph.get_attr(name)
            owners[copy_of[node].name] = _owner(next(iter(node.users)))
        elif not _asserts(node):
            copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
            owners[copy_of[node].name] = _owner(node)
    remove_dead(graph)  # what only assertions have read
    return graph, tensors, {node.name: owners[node.name] for node in graph.nodes if node.op != "output"}


def _lifted(program: ExportedProgram, module: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return placeholder -> the name and tensor that it stands for; a tensor of several names has its first."""
    all_names: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    first = {id(t): name for name, t in reversed([*module.named_parameters(), *module.named_buffers()])}
    lifted: dict[str, tuple[str, Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        name = (spec.target or "").removeprefix("model.")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            lifted[spec.arg.name] = first[id(all_names[name])], all_names[name]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants = sum(name.startswith(CONSTANT) for name, _ in lifted.values())
            lifted[spec.arg.name] = f"{CONSTANT}{constants}", program.constants[spec.target]
    return lifted


def identifiers(names: list[str]) -> list[str]:
    """Return argument names for the places of leaves.

    >>> identifiers([""]), identifiers(["['x']", "['m'][0]", "['m_0']"])
    (['inputs'], ['x', 'm_0', 'm_0_2'])
    """
    clean = [re.sub(r"\W+", "_", name).strip("_") or "inputs" for name in names]
    clean = [f"inputs_{name}" if name[0].isdigit() else name for name in clean]
    return [name if name not in clean[:i] else f"{name}_{i}" for i, name in enumerate(clean)]


def _asserts(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and str(node.target._schema.name).startswith(_ASSERTIONS)


def _clean_block(block: GraphModule) -> GraphModule:
    """Clean a block that runs under no_grad or another autocast, which stays one call."""
    for node in reversed(block.graph.nodes):
        if _asserts(node):
            block.graph.erase_node(node)
    for child in block.children():
        if isinstance(child, GraphModule):
            _clean_block(child)
    remove_dead(block.graph)
    block.recompile()
    return block


def remove_dead(graph: Graph) -> None:
    """Remove nodes that no output needs and that have no effect: neither a write nor a random number."""
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("get_attr", "call_function"):
            continue
        if isinstance(node.target, OpOverload):
            schema, random = node.target._schema, torch.Tag.nondeterministic_seeded in node.target.tags
            dead = not schema.is_mutable and not random and "norm" not in schema.name
        else:
            dead = node.op == "get_attr" or getattr(node.target, "__module__", "") in ("_operator", "math")
        if dead:
            graph.erase_node(node)


def _owner(node: Node) -> str:
    """Return the full name of a node's module; that of its last call where it is called several times."""
    stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
    name = stack[-1] if stack else ""
    return re.sub(r"@\d+", "", name).removeprefix("model").removeprefix(".") if name.startswith("model") else ""
