"""One replica on one device, plain autograd: the oracle that everything else is tested against.

One module on one device: parameters bound to a state, forward and backward in plain autograd.

Gradients told of while the backward pass that makes the others still goes on.

::

    backward    | head ...... | fc ............... | conv ......................... |
    told of                    ^ head.weight, .bias ^ fc.weight, .bias               ^ conv.weight, .bias

One replica on one device, plain autograd: the oracle that everything else is tested against.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.core.types import Clock, ReplicaId
from paceline.program import Program, Tree, call, map_tree
from paceline.replica.base import Batch, Measured, Replica, Sink, finite
from paceline.replica.flat_state import FlatLayout, FlatState
from paceline.replica.noise_norms import MicroNorms
from paceline.trace.recorder import AnyRecorder, NullRecorder

WORTH = 4096
"""Elements of a tensor, on average, from which it costs less to step on each by itself than to copy all of them."""


@dataclass
class GradientHandoff:
    """Hands them from a replica to who steps on them, in place of a Δ that is written into a slot."""

    gradients: list[Tensor] = field(default_factory=list)
    """Of the newest Δ, in the layout's order."""


def worthwhile(layout: FlatLayout) -> bool:
    """Whether the tensors of a layout are large enough."""
    names = layout.parameter_names
    return bool(names) and sum(block.elements for block in layout.parameters) >= WORTH * len(names)


NO_RECORDER = NullRecorder()


class Autograd:
    """A module whose parameters lie in whatever state it is bound to.

    On the CPU binding costs nothing: parameters become views of the state. On another device they are copied. Buffers
    are always copied, since forward passes write them.
    """

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        layout: FlatLayout,
        replica: ReplicaId,
        device: str,
        recorder: AnyRecorder = NO_RECORDER,
    ) -> None:
        self._program, self._device, self._recorder = program, torch.device(device), recorder
        self.module = module.to(self._device).train()
        self.layout = layout
        self._replica = replica
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.parameters = [parameters[e.name] for b in layout.parameters for e in b.entries]
        self._buffers = [buffers[e.name] for b in layout.buffers for e in b.entries]

    @property
    def on_host(self) -> bool:
        """Whether parameters are views of the state they are bound to, not copies."""
        return self._device.type == "cpu"

    def bind(self, state: FlatState) -> None:
        """Let the module's parameters be ``state``'s, and its buffers copies of them."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:  # an attempt that was called off has left it
                    parameter.grad = None
            if self.on_host:
                for parameter, view in zip(self.parameters, state.views.parameters, strict=True):
                    parameter.data = view
            else:
                torch._foreach_copy_([p.data for p in self.parameters], state.views.parameters, non_blocking=True)
            if self._buffers:
                torch._foreach_copy_(self._buffers, state.views.buffers)

    def backward(self, batch: Batch, clock: Clock, weight: float = 1.0) -> float:
        """Add the gradient of ``weight`` · mean loss to the parameters' ``grad``; returns the mean loss."""
        self._seed(step_seed(self._program.seed, self._replica, clock))
        began = time.monotonic_ns()
        loss = self.loss(batch.input, batch.target)
        turned = time.monotonic_ns()
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        self._recorder.record("forward", clock + 1, began, turned)
        self._recorder.record("backward", clock + 1, turned, time.monotonic_ns())
        return value

    def loss(self, inputs: Tree, targets: Tree) -> Tensor:
        """Forward and loss, under the program's precision."""
        if self._device.type != "cpu":
            inputs, targets = (map_tree(lambda t: t.to(self._device), x) for x in (inputs, targets))
        with self._program.autocast(str(self._device)):
            return self._program.loss(call(self.module, inputs), targets)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def take_gradients(self) -> list[Tensor]:
        """The gradients of all parameters (zeros where one has none), which the parameters then no longer hold."""
        grads = []
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter)
            else:
                parameter.grad = None
            grads.append(grad.to_dense() if grad.is_sparse else grad)
        return grads

    def watch(self, added: Callable[[int], None]) -> ExitStack:
        """Tell ``added`` when a backward pass has added to a parameter's ``grad``, until what is returned is closed.

        It does so once for a parameter, also where that is used twice (probed on torch 2.13), but for several reentrant
        checkpoints that use it once each.
        """
        watching = ExitStack()
        for index, parameter in enumerate(self.parameters):
            hook = functools.partial(_tell, added, index)
            watching.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
        return watching

    def dense_gradient(self, index: int) -> Tensor:
        """The gradient of one parameter, which it still holds."""
        grad = self.parameters[index].grad
        assert grad is not None, "it has just been added to"
        if grad.is_sparse:
            self.parameters[index].grad = grad = grad.to_dense()
        return grad

    def write_buffers(self, out: FlatState) -> None:
        """Copy the buffers as they are now into ``out``."""
        if self._buffers:
            torch._foreach_copy_(out.views.buffers, self._buffers)


def _tell(added: Callable[[int], None], index: int, _: Tensor) -> None:
    added(index)


def step_seed(seed: int, replica: ReplicaId, clock: Clock) -> int:
    """The seed of one micro-step's dropout: a function of these three alone, so engines and strategies agree.

    SplitMix64's finaliser over the mixed words (Steele et al. 2014), so near arguments give unrelated seeds.
    """
    z = (seed + 0x9E3779B97F4A7C15 * (replica + 1) + 0xD1B54A32D192ED03 * clock) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


_MASK = 2**64 - 1


class GradientHooks:
    """One replica's, Δ after Δ.

    A gradient is final once a backward pass has added to it, unless it does so twice (layers that reentrant checkpoints
    share). So the first Δ is told of at its end, and of whom it added to twice, always.

    Args:
        autograd: makes the gradients.
        sink: is told.
        mean: whether they are sums over samples, to be divided by their number.
    """

    def __init__(self, autograd: Autograd, sink: Sink, *, mean: bool) -> None:
        self._autograd, self._sink, self._mean = autograd, sink, mean
        self._told: set[int] = set()
        self._added_to: set[int] = set()
        """In the last pass of this Δ, so far."""
        self._twice: set[int] = set()
        """In the last pass of some Δ."""
        self._knows = self._last = False
        self._samples = 0
        self._watch = autograd.watch(self._added)

    def close(self) -> None:
        """Let the parameters be as they were."""
        self._watch.close()

    def opens(self) -> None:
        """A new Δ begins."""
        self._told.clear()
        self._last = False

    def passes(self, samples: int) -> None:
        """A backward pass begins, with which Δ is of so many samples."""
        self._added_to.clear()
        self._last, self._samples = self._sink.last(), samples

    def rest(self, gradients: list[Tensor], samples: int) -> None:
        """All gradients are final."""
        self._samples = samples
        for index, gradient in enumerate(gradients):
            if index not in self._told:
                self._tell(index, gradient)
        self._knows |= self._last
        self._last = False

    def _added(self, index: int) -> None:
        if not self._last:
            return
        if index in self._told:
            raise PacelineError(self._too_late(index))
        if index in self._added_to:
            self._twice.add(index)
        self._added_to.add(index)
        if self._knows and index not in self._twice:
            self._tell(index, self._autograd.dense_gradient(index))

    def _tell(self, index: int, gradient: Tensor) -> None:
        if self._mean and self._samples:
            gradient.div_(self._samples)
        self._told.add(index)
        self._sink.ready(index, gradient, self._samples)

    def _too_late(self, index: int) -> str:
        name = self._autograd.layout.parameter_names[index]
        return (
            f"a backward pass added twice to the gradient of {name}, which none before it did, so a part of it has "
            "been sent already; write use_reentrant=False where checkpoint() is called"
        )


class Single(Replica):
    """Δ is the gradient of the mean loss over the samples of its micro-steps, all at one A.

    With micro-steps of n_i samples and mean gradients g_i, Δ = Σ n_i·g_i / Σ n_i.

    Args:
        autograd: makes gradients.
        micro_steps: of one Δ.
        looks: whether micro-steps are looked at one by one.
    """

    def __init__(self, autograd: Autograd, micro_steps: int = 1, *, looks: bool = False) -> None:
        self._autograd, self._micro_steps = autograd, micro_steps
        self._norms = MicroNorms() if looks and micro_steps > 1 else None
        self._losses = 0.0
        self._samples = 0
        self._early: GradientHooks | None = None

    @contextmanager
    def giving(self, sink: Sink) -> Iterator[None]:
        """While it is entered, the gradients of Δ go to ``sink``, each as soon as it is final, and not to ``out``."""
        self._early = early = GradientHooks(self._autograd, sink, mean=self._micro_steps > 1)
        try:
            yield
        finally:
            self._early = None
            early.close()

    def adopt(self, state: FlatState) -> None:
        self._autograd.bind(state)
        self._losses, self._samples = 0.0, 0
        if self._norms is not None:
            self._norms.clear()  # an attempt that was called off has left it
        if self._early is not None:
            self._early.opens()

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        weight = 1.0 if self._micro_steps == 1 else float(batch.samples)
        if self._early is not None:
            self._early.passes(self._samples + batch.samples)
        loss = self._autograd.backward(batch, clock, weight)
        if self._norms is not None:
            self._norms.add(self._autograd.take_gradients(), batch.samples)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def finish(self, out: FlatState) -> Measured:
        gradients = self._norms.sums if self._norms is not None and self._samples else self._autograd.take_gradients()
        with torch.no_grad():
            looked_at = self._hand_over(gradients, out)
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        micro = self._norms.seen if self._norms is not None else None
        return Measured(loss, self._samples, finite(looked_at, loss), micro)

    def _hand_over(self, gradients: list[Tensor], out: FlatState) -> list[Tensor]:
        """Give Δ to who takes it; returns it where it may still be looked at."""
        if self._early is not None:
            self._early.rest(gradients, self._samples)
            return gradients
        if self._micro_steps > 1 and self._samples:
            torch._foreach_div_(gradients, float(self._samples))
        torch._foreach_copy_(out.views.parameters, gradients)
        return out.parameters
