"""One module on one device: parameters bound to a state, forward and backward in plain autograd."""

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from paceline.core.types import Clock, ReplicaId
from paceline.program import Program, Tree, call, map_tree
from paceline.replica.base import Batch
from paceline.replica.state import Layout, State
from paceline.trace.recorder import AnyRecorder, NullRecorder

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
        layout: Layout,
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

    def bind(self, state: State) -> None:
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

    def write_buffers(self, out: State) -> None:
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
