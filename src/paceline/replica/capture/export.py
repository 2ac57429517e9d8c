"""Export of a model as one graph by torch.export, with the assumptions of that graph about its inputs.

The graph is cleaned up: its tensors get their full names, and assertions about dtypes and sizes, which do not hold
under autocast, are removed (:class:`~.input_spec.InputSpec` checks inputs instead; probed on torch 2.13).
"""

import io
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from itertools import count
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from paceline.core.errors import InputError, is_installed
from paceline.program import Tree, call, leaves, map_tree
from paceline.replica.capture import input_spec
from paceline.replica.capture.input_spec import InputSpec, Rebuild, named_leaves

WAYS_OUT = (
    "write the model as an nn.Sequential of its parts, each of which then runs as it is and is never divided, or train "
    "it with stages=1 shards=1"
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_LAYERS = str(Path(torch.nn.__file__).parent)
_PYTHON = sysconfig.get_paths()["stdlib"]


# The first fields of a paceline.replica.capture.capture.Captured.
CapturedGraph: TypeAlias = tuple[GraphModule, Mapping[str, str], InputSpec, Rebuild]
# Prefix of tensors that the graph holds and the model does not name: torch.tensor(2.0) in forward.
CONSTANT = "_constant_"
# Prefix of blocks under no_grad or another autocast.
BLOCK = "_block_"
_ASSERTIONS = ("aten::_assert", "aten::_functional_assert", "aten::sym_constrain", "aten::_functional_sym_constrain")


class _FlatModel(nn.Module):
    """A model that takes and returns the leaves alone; ``on_output`` receives what rebuilds its output of them."""

    def __init__(self, model: nn.Module, inputs: Tree, on_output: Callable[[Rebuild], None]) -> None:
        super().__init__()
        self.model = model
        # A callback: torch.export (2.13) restores all attributes that forward assigns.
        self._inputs, self._on_output = inputs, on_output

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(given)
        tensors: list[Tensor] = []
        output = call(self.model, map_tree(lambda _: next(remaining), self._inputs))
        self._on_output(input_spec.flatten_tree(output, tensors))
        if not tensors:
            raise InputError(f"{type(self.model).__name__} returns {output!r}, in which there is no tensor")
        return tuple(tensors)


def export_graph(module: nn.Module, inputs: Tree, others: Sequence[Tree] | None = None) -> CapturedGraph:
    """Return the graph of a model in the mode that it is in.

    Args:
        module: any model.
        inputs: a batch.
        others: other batches; sizes in which they don't differ are fixed, besides the number of samples. None: no size
            is fixed that can be left open, which takes torch.export many times as long.

    Raises:
        InputError: torch.export can't trace it; names the line of the model.
    """
    # Sizes 0 and 1 would be taken for constants, and equal sizes for one: so trace with another number of samples.
    batch = input_spec.batch_size(inputs)
    sizes = {size for leaf in leaves(inputs) for size in leaf.shape[1 if leaf.dim() and len(leaf) == batch else 0 :]}
    samples = batch if batch > 1 and batch not in sizes else next(n for n in count(3) if n not in sizes)
    rebuilds: list[Rebuild] = []
    flat = _FlatModel(module, inputs, rebuilds.append)
    example = leaves(input_spec.resized(inputs, samples))
    # All sizes are left open, or those that differ; where torch.export can't do that, only the number of samples.
    every = tuple(tuple(Dim.AUTO if size > 1 else Dim.STATIC for size in leaf.shape) for leaf in example)
    first = tuple((*leaf[:1], *(Dim.STATIC for _ in leaf[1:])) for leaf in every)
    if others is not None:
        every = tuple(
            (*dims[:1], *(dim if place in varying else Dim.STATIC for place, dim in enumerate(dims[1:], 1)))
            for dims, varying in zip(every, input_spec.varying_dims(inputs, others), strict=True)
        )
    program: ExportedProgram | None = None
    failures: list[Exception] = []
    # torch.export logs, prints and warns; what matters of it is in an error.
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        for dims in (every,) if every == first else (every, first):
            try:
                with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
                    program = export(flat, tuple(example), dynamic_shapes={"given": dims}, strict=False)
                    break
            except InputError:
                raise
            except Exception as error:
                failures.append(error)
    finally:
        logging.disable(level)
    if program is None:  # the first failure is reported: the second trace knows less
        raise export_error(module, failures[0]) from failures[0]
    graph, tensors, owners = _clean_graph(program, module, [name for name, _ in named_leaves(inputs)])
    spec = _input_spec(program, inputs, "" if others is None else "no batch that was looked at before has another")
    return GraphModule(tensors, graph), owners, spec, rebuilds[-1]


def export_error(module: nn.Module, error: BaseException) -> InputError:
    """Return the error for a model that torch.export gave up on, with the line of the model where it did."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError(
        f"{type(module).__name__} can't be captured as a graph: torch.export stopped{failing_line(error)}"
        f"{failing_call(error, module)}: "
        f"{type(error).__name__}: {reason}; change that line, or {WAYS_OUT}"
    )


def failing_line(error: BaseException) -> str:
    """Return the user's line that an error comes from, in words that follow what has happened; empty: there is none."""
    frames: list[FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # the outermost first
        frames += [frame for frame in traceback.extract_tb(cause.__traceback__) if is_user_file(frame.filename)]
        cause = cause.__cause__ or cause.__context__
    return f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def failing_call(error: BaseException, module: nn.Module) -> str:
    """Return which of torch's modules or functions an error comes from, in words that follow a line; empty: none.

    Args:
        error: of tracing.
        module: the model, in which the module has a name.
    """
    found: tuple[Any, FrameSummary] | None = None
    cause: BaseException | None = error
    while cause is not None:  # the outermost first
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        for frame, summary in zip(frames, traceback.extract_tb(cause.__traceback__), strict=True):
            if summary.filename.startswith(_LAYERS) and not summary.filename.endswith("module.py"):
                found = frame.f_locals.get("self"), summary
        cause = cause.__cause__ or cause.__context__
    if found is None:
        return ""
    owner, line = found
    if not isinstance(owner, nn.Module):
        return f" (in torch's {line.name}, `{line.line}`)"
    name = next((name for name, each in module.named_modules() if each is owner), "")
    hint = "; write momentum=0.1 there" if getattr(owner, "momentum", 0.1) is None else ""
    return f" (in {f'{name}, a ' if name else ''}{owner}, `{line.line}`{hint})"


def is_user_file(filename: str) -> bool:
    """Return True if a file is part neither of Python, nor of torch, nor of this package's capture."""
    return not filename.startswith(_OURS) and (is_installed(filename) or not filename.startswith(_PYTHON))


def _input_spec(program: ExportedProgram, inputs: Tree, otherwise: str) -> InputSpec:
    """Return the inputs that an exported model takes; ``otherwise`` is why sizes are fixed that no line has fixed."""
    traced = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    values = [traced[name] for name in program.graph_signature.user_inputs]
    # A size that tracing has left open has a name; one that it has fixed is a number.
    dims = [tuple(int(str(d)) if str(d).isdigit() else str(d) for d in value.shape) for value in values]
    leaves = tuple(
        input_spec.LeafSpec(name, t.dtype, d) for (name, t), d in zip(named_leaves(inputs), dims, strict=True)
    )

    # Decisions of the model's own lines on sizes, as ``if x.shape[1] % 2`` makes them. Those of torch's lines are left
    # out: they are made again whenever the graph runs.
    guards: list[tuple[Any, str]] = []
    for guard in values[0].fake_mode.shape_env.guards if values else ():
        frame = guard.sloc.framework_loc
        if isinstance(frame, FrameSummary) and is_user_file(frame.filename):
            guards.append((guard.expr, f"{frame.filename}:{frame.lineno}, `{frame.line}`,"))
    names = {dim for leaf in dims for dim in leaf if isinstance(dim, str)}
    branches = (input_spec.Branch(rule, line) for rule, line in guards if names.issuperset(map(str, rule.free_symbols)))
    equalities = ((rule.rhs, line) for rule, line in guards if getattr(rule, "rel_op", "") == "==")
    fixed = {int(size): f"{line} takes it for a number" for size, line in equalities if size.is_Integer}
    if otherwise:
        chosen = (dim for leaf in dims for dim in leaf[1:] if isinstance(dim, int))
        fixed = dict.fromkeys(chosen, otherwise) | fixed

    spec = InputSpec(input_spec.outline_of(inputs), leaves, tuple(branches), fixed)
    samples = next((leaf.dims[0] for leaf in leaves if leaf.dims), None)
    if isinstance(samples, int):
        raise InputError(
            f"{spec.why_fixed(samples)}, and that is the number of samples, which differs from batch to batch; write "
            f"x.shape[0] for len(x) or for a number of samples, and no loop over them, or {WAYS_OUT}"
        )
    return spec


def _clean_graph(
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
            name = f"{BLOCK}{len(tensors)}"
            tensors[name] = _clean_block(getattr(program.graph_module, node.target))
            copy_of[node] = graph.get_attr(name)
            owners[copy_of[node].name] = _owner(next(iter(node.users)))
        elif not _asserts(node):
            copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
            owners[copy_of[node].name] = _owner(node)
    _remove_dead(graph)  # what only assertions have read
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
    _remove_dead(block.graph)
    block.recompile()
    return block


def _remove_dead(graph: Graph) -> None:
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
