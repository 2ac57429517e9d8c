"""One replica on one device, plain autograd: the oracle that everything else is tested against.

Gradients may be handed over while the backward pass that computes the others still goes on::

    backward    | head ...... | fc ............... | conv ......................... |
    handed over                ^ head.weight, .bias ^ fc.weight, .bias               ^ conv.weight, .bias
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.core.types import Clock, Nanoseconds, ReplicaId
from paceline.device import CPU, placed, seed, stacked
from paceline.program import Program, call, on_device
from paceline.replica.base import Batch, GradientSink, Measured, Replica
from paceline.replica.compilation import CompiledLoss
from paceline.replica.flat_state import FlatLayout, FlatState, finite, read
from paceline.replica.late_figures import LateFigures, largest, zero_nonfinite
from paceline.replica.noise_estimator import MicroNorms
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
        self.module = module
        self.parameters = [parameters[name] for name in self.layout.parameter_names]
        self._buffers = [buffers[e.name] for b in self.layout.buffers for e in b.entries]

    def checked(self, kind: type[Checked], batch: Batch, samples: Sequence[int]) -> Checked:
        """Return the loss compiled, or as graphs, compared with the module, for any replica that trains this module.

        Args:
            kind: which of them.
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
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), forward_ended

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters, zeros where one has none; the parameters' ``grad`` is None then."""
        return [self.take_gradient(index) for index in range(len(self.parameters))]

    def take_gradient(self, index: int) -> Tensor:
        """Return the gradient of one parameter, likewise; those of an own loop stay, of other parts they are zero."""
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
        """Write gradients that were taken into ``out``, but those that were added up there."""
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
            torch._foreach_copy_(out.views.buffers, self._buffers)


def step_seed(seed: int, replica: ReplicaId, clock: Clock) -> int:
    """Return the seed of one micro-step's dropout: a function of these three alone, so engines and strategies agree."""
    # SplitMix64's finaliser over the mixed words (Steele et al. 2014), so near arguments give unrelated seeds.
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15 * (replica + 1) + 0xD1B54A32D192ED03 * clock) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


class GradientHooks:
    """Sends each gradient of a replica to a sink once it is final, Δ after Δ.

    A gradient is final once a backward pass has added to it, unless it does so twice (layers that reentrant checkpoints
    share). So the gradients of the first Δ are all sent at its end, and those that were added to twice always are.

    Args:
        autograd: computes the gradients.
        sink: receives them.
        mean: whether they are sums over samples, to be divided by their number.
        early: whether each is sent as soon as it is final; else all at the end of Δ.
    """

    def __init__(self, autograd: Autograd, sink: GradientSink, *, mean: bool, early: bool = True) -> None:
        self._autograd, self._sink, self._mean = autograd, sink, mean
        self._sent: set[int] = set()
        self._added_to: set[int] = set()
        """Gradients added to so far in the last pass of this Δ."""
        self._twice: set[int] = set()
        """Gradients added to twice in the last pass of some Δ."""
        self._first_delta, self._last = True, False
        self._samples = 0
        self._checked: list[Tensor] = []
        """What is finite if the gradients sent are: see :meth:`checked`."""
        # Autograd calls a hook once for a parameter, also where that is used twice (probed on torch 2.13), except for
        # several reentrant checkpoints that use it once each.
        self.handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._added, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(autograd.parameters if early else ())
        ]

    def begin_delta(self) -> None:
        """Begin a new Δ."""
        self._sent.clear()
        self._checked = []
        self._last = False

    def begin_pass(self, samples: int) -> None:
        """Begin a backward pass, with which Δ is of so many samples."""
        # Only in the last pass of a Δ gradients become final; before it nothing is sent.
        self._added_to.clear()
        self._last, self._samples = self._sink.is_last_micro_step(), samples

    def end_delta(self, samples: int, sums: Sequence[Tensor] | None) -> None:
        """Send the gradients that have not been sent: all are final, and in ``sums`` if these are given."""
        self._samples = samples
        for index in range(len(self._autograd.parameters)):
            if index not in self._sent:
                self._send(index, self._autograd.take_gradient(index) if sums is None else sums[index])
        self._first_delta &= not self._last
        self._last = False

    def _added(self, index: int, parameter: Tensor) -> None:
        if not self._last:
            return
        if index in self._sent:
            name = self._autograd.layout.parameter_names[index]
            raise PacelineError(
                f"a backward pass added twice to the gradient of {name}, which none before it did, so a part of it has "
                "been sent already; write use_reentrant=False where checkpoint() is called"
            )
        if index in self._added_to:
            self._twice.add(index)
        self._added_to.add(index)
        if not self._first_delta and index not in self._twice:
            assert parameter.grad is not None, "it has just been added to"
            self._send(index, self._autograd.take_gradient(index))

    def _send(self, index: int, gradient: Tensor) -> None:
        if self._mean and self._samples:
            gradient.div_(self._samples)
        self._sent.add(index)
        self._checked.append(gradient if gradient.device == CPU else largest([gradient]))
        self._sink.ready(index, gradient, self._samples)

    def checked(self) -> list[Tensor]:
        """Return what is finite if all gradients sent are: themselves; on a device, where they are free by now, their
        largest elements."""
        on_device = self._checked and self._checked[0].device != CPU
        return [stacked(self._checked)] if on_device else self._checked


class Single(Replica):
    """Δ is the gradient of the mean loss over the samples of its micro-steps, all at one A.

    With micro-steps of n_i samples and mean gradients g_i, Δ = Σ n_i·g_i / Σ n_i.

    Args:
        autograd: computes gradients.
        micro_steps: of one Δ.
        measure_micro_steps: whether to measure the norms of micro-steps' gradients.
        late: whether loss and finite stay on the device for now: ``Measured.late``.
    """

    def __init__(
        self, autograd: Autograd, micro_steps: int = 1, *, measure_micro_steps: bool = False, late: bool = False
    ) -> None:
        self._autograd, self._micro_steps, self._late = autograd, micro_steps, late
        self._norms = MicroNorms() if measure_micro_steps and micro_steps > 1 else None
        self._losses = 0.0
        self._unread = list[tuple[Tensor, int]]()
        """Loss and samples of each micro-step of this Δ, where they are read late."""
        self._samples = 0
        self._hooks: GradientHooks | None = None

    @property
    def autograd(self) -> Autograd:
        """Computes the gradients."""
        return self._autograd

    @contextmanager
    def sending_gradients(self, sink: GradientSink, *, early: bool = True) -> Iterator[None]:
        """Context manager: the gradients of Δ go to ``sink`` and not to ``out``, each as soon as it is final.

        Args:
            sink: receives them.
            early: False: all at the end of Δ.
        """
        self._hooks = hooks = GradientHooks(self._autograd, sink, mean=self._micro_steps > 1, early=early)
        try:
            yield
        finally:
            self._hooks = None
            for handle in hooks.handles:
                handle.remove()

    def adopt(self, state: FlatState) -> None:
        self._autograd.bind(state)
        self._losses, self._unread, self._samples = 0.0, [], 0
        if self._norms is not None:
            self._norms.clear()  # a cancelled attempt may have left some
        if self._hooks is not None:
            self._hooks.begin_delta()

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        weight = 1.0 if self._micro_steps == 1 else float(batch.samples)
        if self._hooks is not None:
            self._autograd.check_new(batch)  # before the hooks take its gradients for those of a step
            self._hooks.begin_pass(self._samples + batch.samples)
        if self._late:
            self._unread.append((self._autograd.differentiate(batch, clock, weight)[0], batch.samples))
            loss = math.nan
        else:
            loss = self._autograd.backward(batch, clock, weight)
        if self._norms is not None:
            self._norms.add(self._autograd.take_gradients(), batch.samples)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        with torch.no_grad():
            sums = self._norms.sums if self._norms is not None and self._samples else None
            if self._hooks is not None:
                self._hooks.end_delta(self._samples, sums)
                delta = self._hooks.checked()  # ``out`` is not written
            else:
                gradients = self._autograd.take_gradients() if sums is None else sums
                if self._micro_steps > 1 and self._samples:
                    torch._foreach_div_(gradients, float(self._samples))
                self._autograd.write_gradients(gradients, out)
                delta = out.parameters
            self._autograd.write_buffers(out)
            if not self._samples:
                return Measured(math.nan, 0, True)
            micro = self._norms.norms() if self._norms is not None else None
            if self._late:
                figures = LateFigures(self._unread, delta)
                if self._hooks is None:  # else it is done bucket by bucket
                    zero_nonfinite(delta)
                return Measured(math.nan, self._samples, True, micro, figures)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, finite(delta, self._autograd.checked_loss(loss)), micro)
