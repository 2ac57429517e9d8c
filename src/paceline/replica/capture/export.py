"""Export a model as one graph by torch.export, and say why where that is impossible.

A model as one graph by way of torch.export, and what that graph takes for granted about its inputs.
"""

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
from paceline.replica.capture.cleanup import cleaned
from paceline.replica.capture.input_spec import (
    Branch,
    InputSpec,
    Leaf,
    Rebuild,
    batch_size,
    named_leaves,
    outline_of,
    resized,
    taken_apart,
)

WAYS_OUT = (
    "write the model as an nn.Sequential of its parts, each of which then runs as it is and is never divided, or train "
    "it with stages=1 shards=1"
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PYTHON = sysconfig.get_paths()["stdlib"]


def not_captured(module: nn.Module, error: BaseException) -> InputError:
    """The error for a model that torch.export gave up on, with the line of the model where it did."""
    frames = [f for e in _chain(error) for f in traceback.extract_tb(e.__traceback__) if is_users(f.filename)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError(
        f"{type(module).__name__} can't be captured as a graph: torch.export stopped{where}: "
        f"{type(error).__name__}: {reason}; change that line, or {WAYS_OUT}"
    )


def is_users(filename: str) -> bool:
    """Whether a file is neither of Python, nor of torch, nor of what captures."""
    installed = "site-packages" in filename or "dist-packages" in filename
    return not filename.startswith(_OURS) and (installed or not filename.startswith(_PYTHON))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, the outermost first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


class _Flat(nn.Module):
    """A model that takes and returns the leaves alone."""

    def __init__(self, model: nn.Module, inputs: Tree, told: Callable[[Rebuild], None]) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._told = inputs, told

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        found: list[Tensor] = []
        output = call(self.model, map_tree(lambda _: next(rest), self._inputs))
        self._told(taken_apart(output, found))
        if not found:
            raise InputError(f"{type(self.model).__name__} returns {output!r}, in which there is no tensor")
        return tuple(found)


@dataclass(frozen=True)
class Exported:
    """What came of it."""

    module: GraphModule
    owners: Mapping[str, str]
    form: InputSpec
    output: Rebuild


def exported(module: nn.Module, inputs: Tree) -> Exported:
    """The graph of a model in the mode that it is in.

    Raises:
        InputError: where torch.export can't trace it; names the line of the model.
    """
    rebuilds: list[Rebuild] = []
    flat = _Flat(module, inputs, rebuilds.append)
    example = leaves(resized(inputs, _samples(inputs)))
    program = _traced(flat, example)
    names = [name for name, _ in named_leaves(inputs)]
    graph, tensors, owners = cleaned(program, module, names)
    return Exported(GraphModule(tensors, graph), owners, _form(program, inputs), rebuilds[-1])


def _samples(inputs: Tree) -> int:
    """How many samples to trace with: sizes 0 and 1 would be taken for constants, and equal sizes for one."""
    batch = batch_size(inputs)
    others = {size for leaf in leaves(inputs) for size in leaf.shape[1 if leaf.dim() and len(leaf) == batch else 0 :]}
    return batch if batch > 1 and batch not in others else next(n for n in count(3) if n not in others)


def _traced(flat: _Flat, example: list[Tensor]) -> ExportedProgram:
    """With all sizes left open, or, where torch.export can't do that, the number of samples alone."""
    every = tuple(tuple(Dim.AUTO if size > 1 else Dim.STATIC for size in leaf.shape) for leaf in example)
    first = tuple((*leaf[:1], *(Dim.STATIC for _ in leaf[1:])) for leaf in every)
    failures: list[Exception] = []
    for dims in (every, first):
        try:
            with _quiet():
                return export(flat, tuple(example), dynamic_shapes={"given": dims}, strict=False)
        except InputError:
            raise
        except Exception as error:
            failures.append(error)
    raise not_captured(flat.model, failures[0]) from failures[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export logs, prints and warns of: an error has what matters of it, or the check finds it."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _form(program: ExportedProgram, inputs: Tree) -> InputSpec:
    taken = program.graph_signature.user_inputs
    traced = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    values = [traced[name] for name in taken]
    named = list(named_leaves(inputs))
    dims = [tuple(_dim(size) for size in value.shape) for value in values]
    kept = tuple(Leaf(name, t.dtype, d) for (name, t), d in zip(named, dims, strict=True))
    asked = list(_asked(values))
    names = {dim for leaf in dims for dim in leaf if isinstance(dim, str)}
    branches = (Branch(rule, line) for rule, line in asked if names.issuperset(map(str, rule.free_symbols)))
    equalities = ((rule.rhs, line) for rule, line in asked if getattr(rule, "rel_op", "") == "==")
    fixed = {int(size): line for size, line in equalities if size.is_Integer}
    form = InputSpec(outline_of(inputs), kept, tuple(branches), fixed)
    samples = next((leaf.dims[0] for leaf in kept if leaf.dims), None)
    if isinstance(samples, int):
        raise InputError(
            f"{form.why_fixed(samples)}, and that is the number of samples, which differs from batch to batch; write "
            f"x.shape[0] for len(x) or for a number of samples, and no loop over them, or {WAYS_OUT}"
        )
    return form


def _dim(size: int | torch.SymInt) -> int | str:
    """A size that tracing has left open has a name; one that it has fixed is a number."""
    return int(str(size)) if str(size).isdigit() else str(size)


def _asked(values: list[Any]) -> Iterator[tuple[Any, str]]:
    """What the model's own lines have asked of sizes, as ``if x.shape[1] % 2`` does, and the lines.

    What torch's lines have asked is left out: they ask again whenever the graph runs.
    """
    for guard in values[0].fake_mode.shape_env.guards if values else ():
        where = guard.sloc.framework_loc
        if isinstance(where, FrameSummary) and is_users(where.filename):
            yield guard.expr, f"{where.filename}:{where.lineno}, `{where.line}`,"
