"""Compilation of one worker's part of a model by torch.compile, compared with the part itself at each size of batch.

What is compiled is a function. The module stays as it is, and so do the names of its tensors::

    part.forward ---- torch.compile ---> function ---- compared on a batch ---> forward and backward of each step
         |                                  |
         +--- the part's own tensors, read and written in place by both ---+

Sizes that are known are compared before the first step; torch compiles others as they come, and each is compared on the
batch that is the first of its shapes, before it is trained on. The random numbers and the buffers of a run go on as if
nothing had been compared.

Graphs and kernels are kept between runs in torch's own cache, ``TORCHINDUCTOR_CACHE_DIR``.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.core.errors import InputError
from paceline.program import Program, Tree, leaves, on_device
from paceline.replica.base import Batch
from paceline.replica.capture.difference import reordered_ulps
from paceline.replica.capture.input_spec import Shapes, batch_size, shapes_of
from paceline.replica.capture.verify import ModelError, Reasons, check
from paceline.replica.module_utils import TensorPart, WithLoss, preserve_state, tensors_of

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
            ModelError: the part itself fails on the batch.
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


class CompiledLoss:
    """Forward and loss of a whole model, compiled: ``function(input, target)`` is the mean loss.

    Args:
        program: gives the loss, and the precision.
        module: the model, with its tensors as they will train.
        device: of the model.
    """

    def __init__(self, program: Program, module: nn.Module, device: torch.device) -> None:
        self._program, self._module, self._device = program, module, device
        self._whole = WithLoss(program, module)
        calls = [*module.modules(), program.loss]
        self._compilation = CheckedCompilation(self._whole.forward, "forward and loss", calls)
        self.function, self._compared = self._compilation.function, set[Shapes]()

    def check(self, batch: Batch, samples: Sequence[int] = ()) -> None:
        """Compile, and compare with the model itself.

        Args:
            batch: any.
            samples: sizes of the batches that are compared; empty: the batch as it is.

        Raises:
            InputError: as :meth:`CheckedCompilation.check`.
        """
        inputs = tuple(on_device(tree, self._device) for tree in (batch.input, batch.target))
        with preserve_state(self._module), self._program.autocast(str(self._device)):
            self._compilation.check(self._whole, inputs, samples=samples, through=self._call)

    def check_new(self, batch: Batch) -> None:
        """Compare on a batch whose shapes are new, before it is trained on.

        Raises:
            InputError: as :meth:`CheckedCompilation.check`; what the model itself raises is raised as it is.
        """
        if shapes_of(leaves((batch.input, batch.target))) not in self._compared:
            with _own_failure():
                self.check(batch)

    def _call(self, function: Function, inputs: Tree) -> Tree:
        self._compared.add(shapes_of(leaves(inputs)))
        return function(*inputs)


class CompiledPart:
    """The forward of a captured part of a model, or of a shard of one, compiled.

    Args:
        part: with its tensors as they will train.
        batches: shapes of a batch that shards, if there are any, have in common -> arguments of the part; those that
            need a gradient do so in training.
        comparing: entered for each comparison, by a part whose modules communicate with other shards, all of which call
            the same together; None: they do not.

    Raises:
        InputError: as :meth:`CheckedCompilation.check`.
    """

    def __init__(
        self,
        part: GraphModule,
        batches: Mapping[Shapes, Sequence[Any]],
        comparing: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        called = [part.get_submodule(str(node.target)) for node in part.graph.find_nodes(op="call_module")]
        self._part, self._comparing = part, comparing or nullcontext
        eager = called if comparing is not None else ()
        self._compilation = CheckedCompilation(part.forward, "operators", part.modules(), eager=eager)
        self.function, self._compared = self._compilation.function, set[Shapes]()
        for shapes, arguments in batches.items():
            self._check(shapes, arguments)

    def check_new(self, shapes: Shapes, arguments: Sequence[Any]) -> None:
        """Compare on a batch whose shapes are new, before it is trained on.

        Args:
            shapes: of the batch, as at the start.
            arguments: of the part, tensors without a graph.

        Raises:
            InputError: as :meth:`CheckedCompilation.check`; what the part itself raises is raised as it is.
        """
        if shapes not in self._compared:
            with _own_failure():
                self._check(shapes, arguments)

    def _check(self, shapes: Shapes, arguments: Sequence[Any]) -> None:
        whole, inputs = TensorPart(self._part, arguments), tuple(a for a in arguments if isinstance(a, Tensor))
        differentiable = [index for index, leaf in enumerate(inputs) if leaf.requires_grad]
        with self._comparing():
            through = partial(_call_part, whole)
            self._compilation.check(whole, inputs, of_inputs=differentiable, through=through)
        self._compared.add(shapes)


@contextmanager
def _own_failure() -> Iterator[None]:
    """Context manager: what a model itself raises is raised as it is, as is the end of a cancelled attempt."""
    try:
        yield
    except ModelError as error:
        raise error.__cause__ or error from None


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
