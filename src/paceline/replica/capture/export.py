"""Export of a model as one graph by torch.export, with the assumptions of that graph about its inputs."""

import io
import logging
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule

from paceline.core.errors import InputError
from paceline.program import Tree, call, leaves, map_tree
from paceline.replica.capture.cleanup import clean_graph
from paceline.replica.capture.input_spec import (
    Branch,
    InputSpec,
    LeafSpec,
    Rebuild,
    batch_size,
    flatten_tree,
    named_leaves,
    outline_of,
    resized,
)

WAYS_OUT = (
    "write the model as an nn.Sequential of its parts, each of which then runs as it is and is never divided, or train "
    "it with stages=1 shards=1"
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PYTHON = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True)
class ExportedGraph:
    """A model as a graph: see :class:`~paceline.replica.capture.capture.Captured`."""

    module: GraphModule
    owners: Mapping[str, str]
    input_spec: InputSpec
    rebuild: Rebuild


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
        self._on_output(flatten_tree(output, tensors))
        if not tensors:
            raise InputError(f"{type(self.model).__name__} returns {output!r}, in which there is no tensor")
        return tuple(tensors)


def export_graph(module: nn.Module, inputs: Tree) -> ExportedGraph:
    """Return the graph of a model in the mode that it is in.

    Raises:
        InputError: torch.export can't trace it; names the line of the model.
    """
    # Sizes 0 and 1 would be taken for constants, and equal sizes for one: so trace with another number of samples.
    batch = batch_size(inputs)
    others = {size for leaf in leaves(inputs) for size in leaf.shape[1 if leaf.dim() and len(leaf) == batch else 0 :]}
    samples = batch if batch > 1 and batch not in others else next(n for n in count(3) if n not in others)
    rebuilds: list[Rebuild] = []
    flat = _FlatModel(module, inputs, rebuilds.append)
    program = _trace(flat, leaves(resized(inputs, samples)))
    graph, tensors, owners = clean_graph(program, module, [name for name, _ in named_leaves(inputs)])
    return ExportedGraph(GraphModule(tensors, graph), owners, _input_spec(program, inputs), rebuilds[-1])


def _trace(flat: _FlatModel, example: list[Tensor]) -> ExportedProgram:
    """Trace with all sizes left open or, where torch.export can't do that, only the number of samples."""
    every = tuple(tuple(Dim.AUTO if size > 1 else Dim.STATIC for size in leaf.shape) for leaf in example)
    first = tuple((*leaf[:1], *(Dim.STATIC for _ in leaf[1:])) for leaf in every)
    failures: list[Exception] = []
    for dims in (every, first):  # the first failure is reported: the second trace knows less
        try:
            with _silenced():
                return export(flat, tuple(example), dynamic_shapes={"given": dims}, strict=False)
        except InputError:
            raise
        except Exception as error:
            failures.append(error)
    raise export_error(flat.model, failures[0]) from failures[0]


@contextmanager
def _silenced() -> Iterator[None]:
    """Context manager: torch.export logs, prints and warns nothing; what matters of it is in an error."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def export_error(module: nn.Module, error: BaseException) -> InputError:
    """Return the error for a model that torch.export gave up on, with the line of the model where it did."""
    frames: list[FrameSummary] = []
    cause: BaseException | None = error
    while cause is not None:  # the outermost first
        frames += [frame for frame in traceback.extract_tb(cause.__traceback__) if is_user_file(frame.filename)]
        cause = cause.__cause__ or cause.__context__
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError(
        f"{type(module).__name__} can't be captured as a graph: torch.export stopped{where}: "
        f"{type(error).__name__}: {reason}; change that line, or {WAYS_OUT}"
    )


def is_user_file(filename: str) -> bool:
    """Return True if a file is part neither of Python, nor of torch, nor of this package's capture."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return not filename.startswith(_OURS) and (installed or not filename.startswith(_PYTHON))


def _input_spec(program: ExportedProgram, inputs: Tree) -> InputSpec:
    traced = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    values = [traced[name] for name in program.graph_signature.user_inputs]
    # A size that tracing has left open has a name; one that it has fixed is a number.
    dims = [tuple(int(str(d)) if str(d).isdigit() else str(d) for d in value.shape) for value in values]
    leaves = tuple(LeafSpec(name, t.dtype, d) for (name, t), d in zip(named_leaves(inputs), dims, strict=True))

    # Decisions of the model's own lines on sizes, as ``if x.shape[1] % 2`` makes them. Those of torch's lines are left
    # out: they are made again whenever the graph runs.
    guards: list[tuple[Any, str]] = []
    for guard in values[0].fake_mode.shape_env.guards if values else ():
        frame = guard.sloc.framework_loc
        if isinstance(frame, FrameSummary) and is_user_file(frame.filename):
            guards.append((guard.expr, f"{frame.filename}:{frame.lineno}, `{frame.line}`,"))
    names = {dim for leaf in dims for dim in leaf if isinstance(dim, str)}
    branches = (Branch(rule, line) for rule, line in guards if names.issuperset(map(str, rule.free_symbols)))
    equalities = ((rule.rhs, line) for rule, line in guards if getattr(rule, "rel_op", "") == "==")
    fixed = {int(size): line for size, line in equalities if size.is_Integer}

    spec = InputSpec(outline_of(inputs), leaves, tuple(branches), fixed)
    samples = next((leaf.dims[0] for leaf in leaves if leaf.dims), None)
    if isinstance(samples, int):
        raise InputError(
            f"{spec.why_fixed(samples)}, and that is the number of samples, which differs from batch to batch; write "
            f"x.shape[0] for len(x) or for a number of samples, and no loop over them, or {WAYS_OUT}"
        )
    return spec
