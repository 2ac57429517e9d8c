"""Forward, loss and backward of a module on one device, by autograd or as a graph, on whatever state it is bound to."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.core.errors import InputError
from paceline.core.types import Clock, Nanoseconds, ReplicaId
from paceline.device import placed, seed
from paceline.program import Program, call, on_device
from paceline.replica.base import Batch
from paceline.replica.compilation import CompiledLoss
from paceline.replica.flat_state import FlatLayout, FlatState, read
from paceline.replica.step_graph import StepGraphs
from paceline.trace.recorder import AnyRecorder, NullRecorder

NO_RECORDER = NullRecorder()

Checked = TypeVar("Checked", CompiledLoss, StepGraphs)
# Elements of a tensor, on average, from which a step on each by itself takes less time than a copy of all of them.
HANDOFF_ELEMENTS = 4096


@dataclass
class GradientHandoff:
    """The gradients of a replica's newest Δ, which the optimizer reads where they are: no Δ is written.

    Args:
        gradients: in the layout's order.
    """

    gradients: list[Tensor] = field(default_factory=list)


@dataclass
class OwnGradients:
    """A micro-step whose gradients an own loop computes: they are in the parameters' ``grad``, and stay there.

    Args:
        options: of the loop's optimizer, as :mod:`~paceline.replica.step_options` encodes them.
        loss: mean over its samples; NaN: the loop did not say.
        indices: of the parameters that are stepped, in the layout's order; None: all are.
    """

    options: Tensor
    loss: float = math.nan
    indices: frozenset[int] | None = None


def handoff_pays(layout: FlatLayout) -> bool:
    """Return True if the tensors of a layout are large enough for a :class:`GradientHandoff`."""
    names = layout.parameter_names
    return bool(names) and sum(block.elements for block in layout.parameters) >= HANDOFF_ELEMENTS * len(names)


class Autograd:
    """A module whose parameters are those of the state that it is bound to.

    Where the state is on the module's device binding costs nothing: parameters become views of it. Else they are
    copied. Buffers are always copied, since forward passes write them.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        layout: FlatLayout,
        replica: ReplicaId,
        device: torch.device | str,
        recorder: AnyRecorder = NO_RECORDER,
    ) -> None:
        self._program, self._replica, self.device = program, replica, torch.device(device)
        self._autocasts = program.precision != "fp32"
        self._recorder = None if type(recorder) is NullRecorder else recorder
        placed(module, device=self.device)
        self.layout = layout
        self.use(module.train())
        self.before_reading: Callable[[], None] = lambda: None
        """Waits for the device in another way than the reading of a loss would."""
        self.gradients: FlatState | None = None
        """Δ, where backward passes add gradients up; None: they are tensors of their own until it is written."""
        self.compiled: CompiledLoss | None = None
        """Forward and loss, compiled; None: the module runs as it is."""
        self.graphs: StepGraphs | None = None
        """Forward, loss and backward as graphs, for those batches that have one."""
        self.own: OwnGradients | None = None
        """What an own loop has computed on this module; None: micro-steps compute their gradients."""

    def use(self, module: nn.Module) -> None:
        """Compute on another module with the same tensors, from the next :meth:`bind` on."""
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        names = [entry.name for block in self.layout.buffers for entry in block.entries]
        self.module = module
        self.parameters = [parameters[name] for name in self.layout.parameter_names]
        self._buffers = [buffers[name] for name in names]
        self._places = [(module.get_submodule(part), name) for part, _, name in (n.rpartition(".") for n in names)]
        """The module and the attribute of each buffer."""

    def checked(
        self, kind: Callable[[Program, nn.Module, torch.device], Checked], batch: Batch, samples: Sequence[int]
    ) -> Checked:
        """Return the loss compiled, or as graphs, compared with the module, for any replica that trains this module.

        Args:
            kind: makes one of them.
            batch: the first one.
            samples: sizes of the batches that will be trained with, as far as they are known.

        Raises:
            InputError: as the ``check`` of this kind.
        """
        # Strides of parameters are part of what is compiled, and in A they are those of flat vectors.
        self.bind(read(self.module, self.layout.new(device=self.device)))
        made = kind(self._program, self.module, self.device)
        made.check(batch, samples)
        return made

    def check_new(self, batch: Batch) -> None:
        """Compare what is compiled with the module, if this batch is the first of its shapes; gradients stay.

        Raises:
            InputError: they differ.
        """
        for compared in (self.compiled, self.graphs):
            if compared is not None:
                compared.check_new(batch)

    def bind(self, state: FlatState) -> None:
        """Let the module's parameters be ``state``'s, and its buffers copies of them."""
        if self.graphs is not None:
            self.graphs.written = None
        for parameter in self.parameters if self.own is None else ():
            if parameter.grad is not None:  # left by a cancelled attempt
                parameter.grad = None
        if self.gradients is not None:
            torch._foreach_zero_(self.gradients.parameters)
            for parameter, view in zip(self.parameters, self.gradients.views.parameters, strict=True):
                parameter.grad = view
        if state.device == self.device:
            for parameter, view in zip(self.parameters, state.views.parameters, strict=True):
                parameter.data = view
        elif self.parameters:
            torch._foreach_copy_([p.data for p in self.parameters], state.views.parameters, non_blocking=True)
        if self._buffers:
            self._keep_assigned()
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, state.views.buffers)

    def backward(self, batch: Batch, clock: Clock, weight: float = 1.0) -> float:
        """Add the gradient of ``weight`` · mean loss to the parameters' ``grad``; returns the mean loss."""
        if self.own is not None:
            return self.own.loss
        began = time.monotonic_ns()
        loss, forward_ended = self.differentiate(batch, clock, weight)
        self.before_reading()
        value = float(loss)
        if self._recorder is not None:
            self._recorder.record("forward", clock + 1, began, forward_ended)
            self._recorder.record("backward", clock + 1, forward_ended, time.monotonic_ns())
        return value

    def differentiate(self, batch: Batch, clock: Clock, weight: float = 1.0) -> tuple[Tensor, Nanoseconds]:
        """As :meth:`backward`, but return the mean loss where it is computed, and when the forward pass ended."""
        if self.compiled is not None:
            self.compiled.check_new(batch)
        seed(step_seed(self._program.seed, self._replica, clock), self.device)
        inputs, targets = (on_device(x, self.device) for x in (batch.input, batch.target))
        if self.graphs is not None and (mean := self.graphs.differentiate(inputs, targets, weight)) is not None:
            return mean, time.monotonic_ns()  # all of it counts as forward
        with self._program.autocast(str(self.device)) if self._autocasts else nullcontext():
            loss: Tensor
            if self.compiled is not None:
                loss = self.compiled.function(inputs, targets)
            else:
                # No name for the output: what backward does not need is free then.
                model = self.module
                loss = self._program.loss(model(inputs) if isinstance(inputs, Tensor) else call(model, inputs), targets)
        forward_ended = time.monotonic_ns()
        backpropagate(loss, weight)
        if self.graphs is not None:
            self.graphs.made(time.monotonic_ns())
        return loss.detach(), forward_ended

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters, zeros where one has none; the parameters' ``grad`` is None then."""
        if self.graphs is not None and self.graphs.written is not None:
            return self.graphs.written
        gradients = [parameter.grad for parameter in self.parameters]
        if self.own is not None or any(gradient is None or gradient.is_sparse for gradient in gradients):
            return [self.take_gradient(index) for index in range(len(gradients))]
        for parameter in self.parameters:
            parameter.grad = None
        return cast(list[Tensor], gradients)

    def take_gradient(self, index: int) -> Tensor:
        """Return the gradient of one parameter, likewise; those of an own loop stay, of other parts they are zero."""
        if self.graphs is not None and self.graphs.written is not None:
            return self.graphs.written[index]
        parameter = self.parameters[index]
        grad = parameter.grad
        if self.own is None:
            parameter.grad = None
        elif self.own.indices is not None and index not in self.own.indices:
            grad = None
        if grad is None:
            return torch.zeros_like(parameter)
        # The layout is dense, and so is what is sent.
        return grad.to_dense() if grad.is_sparse else grad

    def write_gradients(self, gradients: list[Tensor], out: FlatState) -> None:
        """Write gradients that were taken into ``out``, but those that are there."""
        if gradients and gradients[0] is out.views.parameters[0]:  # a graph has written all of them
            return
        if self.gradients is None:  # one fused copy
            torch._foreach_copy_(out.views.parameters, gradients)
            return
        for view, gradient in zip(out.views.parameters, gradients, strict=True):
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)

    def checked_loss(self, loss: float) -> float:
        """Return the loss that says whether a Δ is finite: an own loop need not say it."""
        return 0.0 if self.own is not None and math.isnan(self.own.loss) else loss

    def write_buffers(self, out: FlatState) -> None:
        """Copy the buffers as they are now into ``out``."""
        if self._buffers:
            self._keep_assigned()
            torch._foreach_copy_(out.views.buffers, self._buffers)

    def _keep_assigned(self) -> None:
        """Copy what forward has assigned to a buffer (``self.b = …``), rather than written, into that buffer."""
        for (part, name), buffer in zip(self._places, self._buffers, strict=True):
            assigned = part._buffers[name]
            if assigned is buffer:
                continue
            if assigned is None or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
                now = "None" if assigned is None else f"{assigned.dtype} {list(assigned.shape)}"
                raise InputError(
                    f"forward made {name} of {type(part).__name__} {now}, a buffer of {buffer.dtype} "
                    f"{list(buffer.shape)}; keep its shape and type: self.{name}.copy_(…)"
                )
            with torch.no_grad():
                buffer.copy_(assigned)
            part._buffers[name] = buffer


def backpropagate(loss: Tensor, weight: float = 1.0) -> None:
    """Add the gradient of ``weight`` · loss to the leaves' ``grad``.

    As ``(weight * loss).backward()`` does, bit by bit; but where the loss is an ordinary scalar, autograd's engine is
    called at once: what torch does in Python before, to make and check the one gradient, is a tenth of a small model's
    step.
    """
    if type(loss) is not Tensor or loss.dim() or not loss.is_floating_point():
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        return
    given = torch.ones_like(loss)
    if weight != 1.0:
        given *= weight
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (given,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def step_seed(seed: int, replica: ReplicaId, clock: Clock) -> int:
    """Return the seed of one micro-step's dropout: a function of these three alone, so engines and strategies agree."""
    # SplitMix64's finaliser over the mixed words (Steele et al. 2014), so near arguments give unrelated seeds.
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15 * (replica + 1) + 0xD1B54A32D192ED03 * clock) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
