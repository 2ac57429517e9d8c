"""Compilation of one worker's part of a model by torch.compile, compared with the part itself before it trains.

What is compiled is a function. The module stays as it is, and so do the names of its tensors::

    part.forward ---- torch.compile ---> function ---- compared on a batch ---> forward and backward of each step
         |                                  |
         +--- the part's own tensors, read and written in place by both ---+

Graphs and kernels are kept between runs in torch's own cache, ``TORCHINDUCTOR_CACHE_DIR``.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.core.errors import InputError
from paceline.program import Tree, leaves
from paceline.replica.capture.input_spec import batch_size
from paceline.replica.capture.verify import Reasons, check, reordered_ulps
from paceline.replica.module_utils import TensorPart, tensors_of

Function: TypeAlias = Callable[..., Any]

_REASON = "torch.compile has made other operators of it than those that PyTorch runs"
_REASONS = Reasons(output=_REASON, gradient=_REASON, buffer=_REASON, way_out="write compile=false")


class CheckedCompilation:
    """A function that torch compiles as it is first called, to be compared with what it is to compute.

    Args:
        function: of a part's tensors, which have the strides that they will train with.
        description: of what it computes, in words for messages.
        calls: modules and functions that it runs.
        eager: modules within it that are run as they are, since they communicate.
    """

    def __init__(
        self, function: Function, description: str, calls: Iterable[Any], *, eager: Sequence[nn.Module] = ()
    ) -> None:
        _use_own_globals(calls)
        for module in eager:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        # Random numbers are PyTorch's own, so that a run may go on compiled that began as it is, and the other way.
        options: dict[str, Any] = {"fallback_random": True}
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            options["compile_threads"] = 1  # each worker compiles its own part, without a pool of processes each
        from torch._dynamo.utils import counters  # imported by those that compile, and by nobody else

        self._description, self._counted = description, counters["stats"]
        self._graphs_before = self._counted["unique_graphs"]
        self.function: Function = torch.compile(function, options=options)
        """The compiled function."""

    def check(
        self,
        part: nn.Module,
        inputs: Tree,
        *,
        samples: Sequence[int] = (),
        of_inputs: bool | Collection[int] = False,
        through: Callable[[Function, Tree], Tree] = lambda function, inputs: function(*inputs),
    ) -> None:
        """Compile for these inputs, and compare outputs, gradients and buffers with the part's.

        The dim of the samples is compiled for any length, as far as torch has one kernel for all.

        Args:
            part: computes the same, uncompiled.
            inputs: a batch, as ``part`` is called with it.
            samples: sizes of the batches that are compared; empty: the batch as it is.
            of_inputs: whether gradients of the input are computed in training, or of which of its leaves.
            through: calls the function as ``part`` does.

        Raises:
            InputError: torch can't compile it, finds nothing to compile, or what it has compiled differs; the message
                names the first difference.
        """
        from torch._dynamo.exc import TorchDynamoException

        def run(inputs: Tree) -> Tree:
            for leaf in leaves(inputs):
                if leaf.dim() and len(leaf) == batch_size(inputs):
                    torch._dynamo.maybe_mark_dynamic(leaf, 0)
            return through(self.function, inputs)

        named, description = partial(tensors_of, part), f"compiled {self._description}"
        try:
            check(
                part, run, named, inputs, description=description, samples=samples, ulps=reordered_ulps(part),
                of_inputs=of_inputs, reasons=_REASONS,
            )  # fmt: skip
        except InputError as error:
            if isinstance(error.__cause__, TorchDynamoException):
                raise self._not_compiled(part, error.__cause__) from error
            raise
        if self._counted["unique_graphs"] == self._graphs_before:
            raise InputError(
                f"compile=true: torch.compile finds nothing that it can compile in the {self._description} of "
                f"{type(part).__name__}, so it would train as it is; {_REASONS.way_out}"
            )

    def _not_compiled(self, part: nn.Module, error: BaseException) -> InputError:
        """Return the error of a compilation that failed, without torch's advice on its own settings, in later lines."""
        cause = getattr(error, "inner_exception", error)
        kind, reason = type(cause).__name__, str(cause).strip().partition("\n")[0]
        remedy = "install a C++ compiler, g++ for instance, or " if kind == "InvalidCxxCompiler" else ""
        return InputError(
            f"compile=true: torch.compile can't compile the {self._description} of {type(part).__name__}: "
            f"{kind}: {reason}; {remedy}{_REASONS.way_out}"
        )


def compile_part(part: GraphModule, batches: Sequence[Sequence[Any]], *, communicates: bool) -> Function:
    """Return the compiled forward of a captured part of a model, or of a shard of one.

    Args:
        part: with its tensors as they will train.
        batches: arguments of the part, for each size that is compiled and checked; those that need a gradient do so in
            training.
        communicates: whether the modules that it calls communicate with other shards, all of which call this together.

    Raises:
        InputError: as :meth:`CheckedCompilation.check`.
    """
    called = [part.get_submodule(str(node.target)) for node in part.graph.find_nodes(op="call_module")]
    compilation = CheckedCompilation(part.forward, "operators", part.modules(), eager=called if communicates else ())
    for arguments in batches:
        whole, inputs = TensorPart(part, arguments), tuple(a for a in arguments if isinstance(a, Tensor))
        differentiable = [index for index, leaf in enumerate(inputs) if leaf.requires_grad]
        through = partial(_call_part, whole)
        compilation.check(whole, inputs, of_inputs=differentiable, through=through)
    return compilation.function


def _use_own_globals(calls: Iterable[Any]) -> None:
    """Have torch.compile read global names of functions that another process has sent where these read them.

    Such a function has globals of its own. torch 2.13 looks a name up in the module of their ``__name__`` instead, the
    script of the other process, of which this one has none, or another; without ``__name__`` in the globals themselves.
    """
    for each in calls:
        attributes = (type(each).forward, *vars(each).values()) if isinstance(each, nn.Module) else (each,)
        for function in attributes:
            names = getattr(getattr(function, "func", function), "__globals__", {})
            module = sys.modules.get(names.get("__name__", ""))
            if "__name__" in names and (module is None or vars(module) is not names):
                del names["__name__"]


def _call_part(whole: TensorPart, function: Function, inputs: Tree) -> Tree:
    """Call a function in place of a part's forward."""
    return whole.rebuild(function(*whole.flatten(inputs)))
