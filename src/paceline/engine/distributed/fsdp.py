"""A module whose parameters are sharded by torch's fully_shard (FSDP2), and synchronous training on it.

A module whose parameters are divided among the ranks, by torch's own ``fully_shard`` (FSDP2).

::

    forward     for each unit: all-gather of its parameters, its forward, let go
    backward    for each unit: all-gather of its parameters, its backward, reduce-scatter of its gradients, let go

but the last unit, which is the model, stays whole from its forward to its backward.

Each parameter is cut along its first dim. What torch asks to be gathered and summed goes through the run's own
communicator: so it is watched and counted. The idea: Rajbhandari et al. 2019, arXiv 1910.02054 (ZeRO-3), and Zhao et
al. 2023, arXiv 2304.11277.

Synchronous training on divided parameters: Δ is summed as it is computed, and each rank steps on its part.

::

    rank 0   n0·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+   rows of all -> policy
    rank 1   n1·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+-> the same scale on all,
                                                                                            a step on each part

How many samples there are in all is known only when ranks meet after backward: so losses are weighed by their own
samples, and the sum is divided then.
"""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import InputError
from paceline.core.types import Clock
from paceline.engine.distributed.reduce_buffer import ReduceBuffer
from paceline.engine.distributed.update import Update, take_buffers
from paceline.engine.spmd.communicator import Communicator
from paceline.program import Program
from paceline.replica.base import Batch, Measured, Replica, finite
from paceline.replica.clipping import clip_scale, square_norm
from paceline.replica.flat_optimizer import FlatOptimizer
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState, TensorEntry, Views
from paceline.replica.single import Autograd

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others: their members are the layers of a model, in which it is natural to cut it."""

_WHOLE = (nn.MultiheadAttention,)
"""Modules that stay as they are within the unit around them."""

LAYER = 1 / 256
"""Of all parameters: what a member of a list holds at least, for a gather of its own to be worth while."""

LARGE = 1 / 8
"""Of all parameters: what any other module holds at least."""


def units(module: nn.Module) -> list[nn.Module]:
    """The units of a module, those inside others before these; the last is the module itself.

    A member of a list that holds 1/256 of all bytes, and any other module that holds 1/8, is a unit, if forward of no
    module outside can read its parameters. What is inside it and a unit already does not count.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Linear', 'Sequential']
    >>> model[2].weight = nn.Linear(8, 3).weight
    >>> model.append(nn.Linear(8, 3))[3].weight = model[2].weight          # tied: only the whole holds both places
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Sequential']
    """
    places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    total = sum(p.nbytes for p in module.parameters())
    covered: set[int] = set()
    found = []
    for inner, member in _inside(module):
        own = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False) if id(p) not in covered)
        nbytes = sum(p.nbytes for p in inner.parameters() if id(p) in own)
        alone = all(places[key] == count for key, count in own.items())
        if alone and own and nbytes >= total * (LAYER if member else LARGE):
            found.append(inner)
            covered.update(own)
    return [*found, module]


def _inside(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """All modules in it that have a forward of their own, children first, and whether each is a member of a list."""
    seen = set() if seen is None else seen
    for child in module.children():
        if id(child) not in seen and not isinstance(child, _WHOLE):
            seen.add(id(child))
            yield from _inside(child, seen)
            if type(child).forward is not nn.Module.forward and not isinstance(child, _LISTS):
                yield child, isinstance(module, _LISTS)


class FsdpModule:
    """One rank's part of a module's parameters and of the sum of all ranks' gradients.

    Args:
        module: whole, with the values of A_0; it is changed in place.
        layout: of A.
        ranks: how many there are.
        communicator: by which they meet.
    """

    def __init__(self, module: nn.Module, layout: FlatLayout, ranks: int, communicator: Communicator) -> None:
        self._layout, self._ranks, self._communicator = layout, ranks, communicator
        self.absent = False
        """Whether this rank only lets the others go on: its gradients don't count."""
        self.finite = True
        """Whether all gradients are that this rank has brought; for who counts to set anew."""
        mesh = DeviceMesh.from_group(communicator.group.handle, "cpu")
        gather, total = _Gather(communicator), _Sum(communicator, self)
        for unit in units(module):
            _divide(unit, mesh, gather, total)
        named = dict(module.named_parameters())
        self._parameters = [named[e.name] for block in layout.parameters for e in block.entries]
        self.part = _as_state([p.detach() for p in self._parameters])
        """This rank's part of A, one vector for each parameter: what the module gathers lies in them."""

    @property
    def nbytes(self) -> int:
        """Of this rank's part of A."""
        return self.part.layout.nbytes

    def like(self) -> FlatState:
        """Zeros in the form of :attr:`part`."""
        return _as_state([torch.zeros_like(p.detach()) for p in self._parameters])

    def take_gradients(self, out: FlatState) -> None:
        """Write this rank's part of the sum of all gradients, which are then gone; zeros where a parameter has none."""
        for parameter, vector in zip(self._parameters, out.parameters, strict=True):
            if parameter.grad is None:
                vector.zero_()
            else:
                vector.copy_(_local(parameter.grad).reshape(-1))
                parameter.grad = None

    @torch.no_grad()
    def full_state(self, *, wanted: bool) -> FlatState | None:
        """A's parameters from all ranks, for those who want them; all ranks call it together.

        It is for scores, so its bytes are not counted as training's.
        """
        sent = self._communicator.sent_bytes
        found = self._layout.new() if wanted else None
        views: Iterable[Tensor | None] = [None] * len(self._parameters) if found is None else found.views.parameters
        for parameter, view in zip(self._parameters, views, strict=True):
            gathered = self._gathered(parameter)
            if view is not None:
                view.copy_(gathered)
        self._communicator.sent_bytes = sent
        return found

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """One parameter, whole: equal parts along its first dim, of which the last may be shorter or missing."""
        size, mine = parameter.shape, _local(parameter.detach())
        most = -(-size[0] // self._ranks)
        padded = mine.new_zeros(most, *size[1:])
        padded[: len(mine)] = mine
        rows = mine.new_empty(self._ranks * most, *size[1:])
        self._communicator.wait(self._communicator.all_gather(rows, padded.view(-1)), "the gathering of A")
        return rows[: size[0]]


class _Gather:
    """The all-gather that torch asks for; over when it returns."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        del group, async_op
        self._communicator.wait(self._communicator.all_gather(output_tensor, input_tensor), "the all-gather of a layer")


class _Sum:
    """The reduce-scatter that torch asks for; over when it returns."""

    def __init__(self, communicator: Communicator, divided: FsdpModule) -> None:
        self._communicator, self._divided = communicator, divided

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        del group, op, async_op
        if self._divided.absent:
            input_tensor.zero_()
        elif not finite([input_tensor], 0.0):
            self._divided.finite = False
        work = self._communicator.reduce_scatter(input_tensor, output_tensor)
        self._communicator.wait(work, "the reduce-scatter of a layer's gradients")


def _divide(module: nn.Module, mesh: DeviceMesh, gather: Any, total: Any) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")  # half a second, for those alone who ask for it
    unit: Any = fsdp.fully_shard(module, mesh=mesh)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(total)


def only_buffers(state: FlatState) -> FlatState:
    """What every rank has of A: its running buffers."""
    return FlatState(FlatLayout((), state.layout.buffers), [], state.buffers)


def _as_state(parameters: Sequence[Tensor]) -> FlatState:
    """Divided tensors as a state: this rank's part of each is a vector, and a view is the tensor as torch has it."""
    local = [_local(p) for p in parameters]
    entries = [TensorEntry(str(i), part.shape, 0, part.numel()) for i, part in enumerate(local)]
    layout = FlatLayout(tuple(DtypeBuffer(part.dtype, (e,)) for part, e in zip(local, entries, strict=True)), ())
    return FlatState(layout, [part.view(-1) for part in local], [], Views(list(parameters), []))


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    """This rank's part, where it lies."""
    part: Tensor = tensor.to_local()
    return part


@final
class FsdpShard(Update):
    """Each rank has its part of A, of Σ Δ and of the optimizer's state, and of nothing else.

    Args:
        program: gives optimizer, scheduler and clipping.
        divided: this rank's part.
        freight: brings the running buffers.
        running: A's running buffers, which every rank has.
        communicator: by which ranks meet.
    """

    def __init__(
        self,
        program: Program,
        divided: FsdpModule,
        freight: ReduceBuffer,
        running: FlatState,
        communicator: Communicator,
    ) -> None:
        self._divided, self._freight, self._running, self._communicator = divided, freight, running, communicator
        self._clip_norm = program.clip_norm
        self._gradient = divided.like()
        self._stepper = FlatOptimizer(program.optimizer, program.scheduler, divided.part, self._gradient)

    @property
    def reduced_vectors(self) -> list[Tensor]:
        return self._freight.tails

    @property
    def optimizer_bytes(self) -> int:
        return self._stepper.nbytes

    def apply(self, factor: float, rate: float) -> None:
        self._divided.take_gradients(self._gradient)
        gradients = self._gradient.parameters
        torch._foreach_mul_(gradients, factor)
        if self._clip_norm is not None:
            square = torch.tensor([square_norm(gradients)], dtype=torch.float64)
            self._communicator.all_reduce([square], "the norm of Δ")
            torch._foreach_mul_(gradients, clip_scale(float(square), self._clip_norm))
        self._stepper.step(gradients, rate)
        take_buffers(self._running, self._freight.state)

    def full_state(self, *, wanted: bool) -> FlatState | None:
        found = self._divided.full_state(wanted=wanted)
        if found is not None:
            for mine, running in zip(found.buffers, self._running.buffers, strict=True):
                mine.copy_(running)
        return found


@final
class FsdpReplica(Replica):
    """Computes Δ on a divided module; what it writes is the running buffers alone, since Δ is summed already.

    Args:
        autograd: of the divided module, its layout without parameters.
        divided: the parameters of that module.
        weigh: what a batch of so many samples counts in the sum.
    """

    def __init__(self, autograd: Autograd, divided: FsdpModule, weigh: Callable[[int], float]) -> None:
        self._autograd, self._divided, self._weigh = autograd, divided, weigh
        self._losses = 0.0
        self._samples = 0

    def adopt(self, state: FlatState) -> None:
        self._autograd.bind(state)
        self._losses, self._samples, self._divided.finite = 0.0, 0, True

    def advance(self, batch: Batch, clock: Clock) -> float:
        if not batch.samples:
            return math.nan
        loss = self._backward(batch, clock)
        self._losses += loss * batch.samples
        self._samples += batch.samples
        return loss

    def _backward(self, batch: Batch, clock: Clock) -> float:
        try:
            return self._autograd.backward(batch, clock, self._weigh(batch.samples))
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise InputError(
                "the model reads a parameter of a layer without calling that layer (as F.linear(x, self.head.weight)), "
                "but shard_parameters=True gathers a layer's parameters as it is called; call the layer, or write "
                "shard_optimizer=true instead"
            ) from error

    def finish(self, out: FlatState) -> Measured:
        with torch.no_grad():
            self._autograd.write_buffers(out)
        if not self._samples:
            return Measured(math.nan, 0, True)
        loss = self._losses / self._samples
        return Measured(loss, self._samples, self._divided.finite and math.isfinite(loss))
