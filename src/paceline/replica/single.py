"""One replica on one device: the oracle that everything else is tested against.

Gradients may be handed over while the backward pass that computes the others still goes on::

    backward    | head ...... | fc ............... | conv ......................... |
    handed over                ^ head.weight, .bias ^ fc.weight, .bias               ^ conv.weight, .bias
"""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.core.types import Clock
from paceline.device import CPU, stacked
from paceline.replica.autograd import Autograd
from paceline.replica.base import Batch, GradientSink, Measured, Replica
from paceline.replica.flat_state import FlatState, finite
from paceline.replica.late_figures import LateFigures, largest, zero_nonfinite
from paceline.replica.noise_estimator import MicroNorms


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
