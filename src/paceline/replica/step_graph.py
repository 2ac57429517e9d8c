"""Forward, loss and backward of a whole model as one list of operators, which runs without Python and autograd.

Of a step of a small model most is what Python and autograd do between operators::

    as it is   | Python | linear | Python | relu | Python | ... | autograd | mm | autograd | mm | ...
    a graph    | linear | relu | ... | mm | mm | ...

The operators are those that PyTorch itself runs, in its order, so loss, gradients and buffers have the same bits, and
random numbers are drawn as ever. They are traced once for each form of batch, and compared with the model on the first
batch of that form, before it is trained on. What Python decides in forward is decided then; what a graph would lose of
what Python does is refused.
"""

import random
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Nanoseconds
from paceline.device import CPU
from paceline.program import Program, Tree, leaves, map_tree, on_device
from paceline.replica.base import Batch
from paceline.replica.capture.difference import reordered_ulps
from paceline.replica.capture.export import failing_call, failing_line
from paceline.replica.capture.input_spec import resized
from paceline.replica.capture.verify import ModelError, Reasons, check, model_runs
from paceline.replica.flat_state import FlatState
from paceline.replica.module_utils import WithLoss, add_gradients, hooks_of, preserve_state, tensors_of
from paceline.replica.operator_list import Operators, as_it_is, operators_of, write_outputs
from paceline.replica.operator_trace import trace

WAY_OUT = "write compile=false"
_REASONS = Reasons(
    output="forward decides by values, or by what Python has kept since the last batch, which a graph does not see",
    gradient="a hook on a parameter's gradient, or a value that forward takes from .data, is not in a graph as it is",
    buffer="a graph keeps what forward writes into a buffer (self.b.copy_(...)), not what it assigns (self.b = ...)",
    way_out=WAY_OUT,
)

MOST = 16
"""Forms of batches that have graphs; others run as they are."""


class StepGraph:
    """Forward, loss and backward for one form of batch.

    Args:
        operators: (a model's tensors, the leaves of a batch, the gradient of the loss, ``constants``) -> the loss, and
            the gradients of ``parameters``.
        constants: tensors that forward has made from numbers.
        parameters: those that the loss depends on.
        weight: scalar that the gradient of the loss is written to, 1 at first.
        delta: returns what the operators write the gradients into, and are given before the constants; None: they
            return them.
    """

    def __init__(
        self,
        operators: Operators,
        constants: Sequence[Tensor],
        parameters: Sequence[Tensor],
        weight: Tensor,
        *,
        delta: Callable[[], FlatState] | None = None,
    ) -> None:
        self._operators, self._constants, self.parameters, self.delta = operators, constants, parameters, delta
        self._weight, self._weight_tensor = 1.0, weight
        self.steps = self.compared = 0
        """How many steps it has made, and on how many batches it was compared with the model."""

    @property
    def due(self) -> bool:
        """Whether it is to be compared: it has made one step, and may have taken values of that batch for constants."""
        return self.steps == self.compared == 1

    def run(self, tensors: Sequence[Tensor], batch: Sequence[Tensor], weight: float = 1.0) -> Sequence[Tensor]:
        """Return the loss, and the gradients of ``weight`` · loss, which may be the tensors of Δ."""
        places = () if self.delta is None else self.delta().views.parameters
        if weight != self._weight:
            self._weight = weight
            self._weight_tensor.fill_(weight)
        # Not under no_grad, where some operators keep nothing for the backward that is called after them.
        with torch._C._AutoDispatchBelowAutograd():
            return *self._operators(*tensors, *batch, self._weight_tensor, *places, *self._constants), *places


class StepGraphs:
    """The graphs of a model, one for each form of its batches.

    Args:
        program: gives the loss, and the precision.
        module: the model, in training mode.
        device: of the model.
        delta: returns the buffer of the Δ under way, for graphs to write gradients into; None: they do not.

    Raises:
        InputError: the model has hooks, which a graph does not call.
    """

    def __init__(
        self, program: Program, module: nn.Module, device: torch.device, delta: Callable[[], FlatState] | None = None
    ) -> None:
        self._program, self._module, self._device, self._delta = program, module, device, delta
        self.written: list[Tensor] | None = None
        """The tensors of Δ, if the newest step has written them; None: its gradients are the parameters' ``grad``."""
        self._whole = WithLoss(program, module)
        self._named = tensors_of(module)
        self._tensors = list(self._named.values())
        self._graphs = dict[Hashable, StepGraph]()
        """By form of batch."""
        _refuse_hooks(module)

    def check(self, batch: Batch, samples: Sequence[int] = ()) -> None:
        """Trace, and compare with the model itself.

        Args:
            batch: any.
            samples: sizes of the batches for which that is done; empty: the batch as it is.

        Raises:
            InputError: the model can't be traced, or its graph does something else; the message names the first
                difference.
            ModelError: the model itself fails on the batch.
        """
        pair = tuple(on_device(tree, self._device) for tree in (batch.input, batch.target))
        for inputs in [resized(pair, count) for count in samples] or [pair]:
            graph = self._graphs.get(form := form_of(inputs))
            if graph is None and len(self._graphs) < MOST:
                self._graphs[form] = self._compared(inputs, None)
            elif graph is not None and graph.due:
                self._compared(inputs, graph)

    def check_new(self, batch: Batch) -> None:
        """Trace for a batch whose form is new, before it is trained on, and compare; compare on the next one, too.

        Raises:
            InputError: as :meth:`check`; what the model itself raises is raised as it is.
        """
        try:
            self.check(batch)
        except ModelError as error:
            raise error.__cause__ or error from None

    def differentiate(self, inputs: Tree, target: Tree, weight: float) -> Tensor | None:
        """Add the gradient of ``weight`` · mean loss to the parameters' ``grad``; returns the mean loss.

        Returns:
            None: this form has no graph, and nothing has been done.
        """
        return self._differentiate(form_of((inputs, target)), inputs, target, weight)

    def _differentiate(self, form: Hashable, inputs: Tree, target: Tree, weight: float) -> Tensor | None:
        graph = self._graphs.get(form)
        if graph is None or graph.due:
            self.check_new(Batch(inputs, target, 0))
            graph = self._graphs.get(form)
        if graph is None:
            return None
        loss, *gradients = self._run(graph, leaves((inputs, target)), weight)
        if graph.delta is None:
            add_gradients(graph.parameters, gradients)
        else:
            self.written = gradients
        graph.steps += 1
        return loss

    def made(self, now: Nanoseconds) -> None:
        """Note that the step of which there was no graph is over."""

    def _run(self, graph: StepGraph, batch: Sequence[Tensor], weight: float = 1.0) -> Sequence[Tensor]:
        try:
            return graph.run(self._tensors, batch, weight)
        except RuntimeError as error:  # the operator's own words come last
            said = str(error).strip().rpartition("Error: ")[2]
            raise RuntimeError(f"{said} (compile=false says in which line of the model)") from error

    def _compared(self, inputs: Tree, known: StepGraph | None) -> StepGraph:
        """Return the graph for a batch (None: it is to be made), compared with the model, which is left as it is."""
        whole = self._whole

        def run(inputs: Tree) -> Tensor:
            loss: Tensor = Differentiated.apply(partial(self._run, graph), leaves(inputs), *graph.parameters)  # type: ignore[no-untyped-call]
            return loss

        # The same operators in the same order, but a device may choose its kernels by what else it is doing.
        tolerance: dict[str, Any] = {} if self._device == CPU else {"ulps": reordered_ulps(whole)}
        with preserve_state(self._module):
            with self._program.autocast(str(self._device)):
                expected = model_runs(whole, inputs, (), of_inputs=False)
            graph = known or self._traced(inputs)
            with as_it_is():
                check(
                    whole, run, partial(tensors_of, whole), inputs, description="graph of forward, loss and backward",
                    samples=(), of_inputs=False, reasons=_REASONS, runs=expected, **tolerance,
                )  # fmt: skip
        graph.compared += 1
        return graph

    def _traced(self, inputs: Tree) -> StepGraph:
        """Trace forward, loss and backward on a batch, which changes nothing."""
        whole = self._whole

        def loss_of(own: Mapping[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
            remaining = iter(batch)
            with self._program.autocast(str(self._device)):
                made: Tensor = torch.func.functional_call(whole, dict(own), map_tree(lambda _: next(remaining), inputs))
            return made

        try:
            with preserve_state(self._module), _refusing_effects(self._module):
                return traced_step(loss_of, self._named, leaves(inputs), self._device, self._delta)
        except Exception as error:
            name = type(whole).__name__
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            raise InputError(
                f"compile=graph: forward, loss and backward of {name} can't be traced{failing_line(error)}"
                f"{failing_call(error, self._module)}: {kind}{reason}; change that, or {WAY_OUT}"
            ) from error


def traced_step(
    loss_of: Callable[[Mapping[str, Tensor], Sequence[Tensor]], Tensor],
    named: Mapping[str, Tensor],
    batch: Sequence[Tensor],
    device: torch.device = CPU,
    delta: Callable[[], FlatState] | None = None,
) -> StepGraph:
    """Trace forward, loss and backward, which are run; afterwards the tensors are as they were.

    Args:
        loss_of: (tensors of a model by name, leaves of a batch) -> the loss.
        named: those tensors.
        batch: leaves of a batch like those that the graph will be given.
        device: of the loss.
        delta: returns what gradients are to be written into, if the loss depends on all that it has.

    Raises:
        InputError: TorchScript has no operator for something.
        Exception: torch can't trace it.
    """
    trained = [name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
    used: list[str] = []

    def step(tensors: list[Tensor], batch: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        own, (weight,) = dict(zip(named, tensors, strict=True)), weights
        loss = loss_of(own, batch)
        weighted: Tensor = _Weighted.apply(loss, weight.to(loss.dtype))  # type: ignore[no-untyped-call]
        gradients = torch.autograd.grad(weighted, [own[name] for name in trained], allow_unused=True)
        used[:] = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is not None]
        # Autograd, too, gives a parameter's gradient the parameter's strides.
        return (loss.detach(), *(gradient.contiguous() for gradient in gradients if gradient is not None))

    weight = torch.ones((), device=device)
    with warnings.catch_warnings(action="ignore"):
        torch.clear_autocast_cache()  # of weights that the model itself has cast
        traced = trace(step, list(named.values()), batch, [weight])
        if delta is not None and used == (state := delta()).layout.parameter_names:
            write_outputs(traced, state.views.parameters)
        else:
            delta = None
        operators, constants = operators_of(traced)
    return StepGraph(operators, constants, [named[name] for name in used], weight, delta=delta)


def form_of(tree: Tree) -> Hashable:
    """Return what a graph is traced for: shapes, strides and types of a batch's tensors, and all else that is in it.

    Raises:
        InputError: something in it is neither a tensor nor a value that can be compared.

    >>> form_of((torch.ones(2, 3), {"n": 4})) == form_of((torch.zeros(2, 3), {"n": 4}))
    True
    >>> form_of((torch.ones(2, 3), {"n": 4})) == form_of((torch.ones(2, 3), {"n": 5}))
    False
    """
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, Mapping):
        return tuple((key, form_of(value)) for key, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(form_of, tree)
    if not isinstance(tree, Hashable):
        raise InputError(
            f"compile=graph: a batch has a {type(tree).__name__}, of which nobody knows whether a graph holds for it; "
            f"give the model tensors, numbers and texts, or {WAY_OUT}"
        )
    return type(tree), tree


class _Weighted(torch.autograd.Function):
    """(loss, weight) -> the loss, whose gradient is the weight instead of 1.

    Given to ``torch.autograd.grad`` itself, a gradient has it import SymPy, half a second, to compare two shapes.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight.expand(loss.shape) if loss.dim() else weight)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        del outputs
        return *ctx.saved_tensors, None


class Differentiated(torch.autograd.Function):
    """(what runs a graph, leaves of a batch, parameters) -> the loss, whose gradients are the graph's: for checks."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Sequence[Tensor]], Sequence[Tensor]], batch: Sequence[Tensor], *parameters: Tensor
    ) -> Tensor:
        del parameters
        with torch.enable_grad():  # as in training
            loss, *ctx.gradients = run(batch)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (of_loss,) = outputs
        return None, None, *(gradient * of_loss for gradient in ctx.gradients)


def _refuse_hooks(module: nn.Module) -> None:
    """Raise InputError, naming the first, if modules or gradients of parameters have hooks."""
    for what, hook in hooks_of(module):
        said = getattr(hook, "__qualname__", type(hook).__name__)
        raise InputError(
            f"compile=graph: {what} has a hook, {said}, which a graph would not call; remove it, or {WAY_OUT}"
        )


@contextmanager
def _refusing_effects(module: nn.Module) -> Iterator[None]:
    """Context manager for a forward that is traced.

    Raises:
        InputError: it has done what a graph does not repeat: set an attribute, or drawn from Python's or NumPy's random
            numbers.
    """
    before = [(name, part, _attributes(part)) for name, part in module.named_modules()]
    drawn = random.getstate(), np.random.get_state(legacy=False)["state"]
    yield
    for name, part, attributes in before:
        now = _attributes(part)
        for attribute in {**attributes, **now}:
            missing = object()
            if not _same(attributes.get(attribute, missing), now.get(attribute, missing)):
                raise InputError(
                    f"forward changes {f'{name}.' if name else 'self.'}{attribute}, which a graph would not do again; "
                    "keep it in a buffer and write into that (self.b.copy_(...))"
                )
    if not _same(drawn, (random.getstate(), np.random.get_state(legacy=False)["state"])):
        raise InputError("forward draws from Python's or NumPy's random numbers, a graph from torch's alone")


# Tensors by name, and what torch.nn.RNNBase keeps of them.
_TENSORS = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})


def _attributes(part: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes; lists and dicts as they are now."""
    own = {name: value for name, value in vars(part).items() if name not in _TENSORS}
    return {name: value.copy() if type(value) in (list, dict) else value for name, value in own.items()}


def _same(before: Any, now: Any) -> bool:
    """Return whether two values are one object, or equal numbers, texts, arrays, or collections of such."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(value, now[key]) for key, value in before.items())
    if isinstance(before, (list, tuple)):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, np.ndarray):
        return np.array_equal(before, now)
    return isinstance(before, (int, float, complex, str, bytes)) and before == now
