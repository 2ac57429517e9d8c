"""A module whose parameters are divided among the ranks, by torch's own ``fully_shard`` (FSDP2).

::

    forward     for each unit: all-gather of its parameters, its forward, let go
    backward    for each unit: all-gather of its parameters, its backward, reduce-scatter of its gradients, let go

but the last unit, which is the model, stays whole from its forward to its backward.

Each parameter is cut along its first dim. What torch asks to be gathered and summed is carried by the run's own
traffic: so it is waited for with open eyes, and counted. The idea: Rajbhandari et al. 2019, arXiv 1910.02054 (ZeRO-3),
and Zhao et al. 2023, arXiv 2304.11277.
"""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.engine.distributed.units import units
from paceline.engine.team.traffic import Traffic
from paceline.replica.base import finite
from paceline.replica.state import Block, Entry, Layout, State, Views


class Divided:
    """One rank's part of a module's parameters and of the sum of all ranks' gradients.

    Args:
        module: whole, with the values of A_0; it is changed in place.
        layout: of A.
        ranks: how many there are.
        traffic: by which they meet.
    """

    def __init__(self, module: nn.Module, layout: Layout, ranks: int, traffic: Traffic) -> None:
        self._layout, self._ranks, self._traffic = layout, ranks, traffic
        self.absent = False
        """Whether this rank only lets the others go on: its gradients don't count."""
        self.finite = True
        """Whether all gradients are that this rank has brought; for who counts to set anew."""
        mesh = DeviceMesh.from_group(traffic.group.handle, "cpu")
        gather, total = _Gather(traffic), _Sum(traffic, self)
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

    def like(self) -> State:
        """Zeros in the form of :attr:`part`."""
        return _as_state([torch.zeros_like(p.detach()) for p in self._parameters])

    def take_gradients(self, out: State) -> None:
        """Write this rank's part of the sum of all gradients, which are then gone; zeros where a parameter has none."""
        for parameter, vector in zip(self._parameters, out.parameters, strict=True):
            if parameter.grad is None:
                vector.zero_()
            else:
                vector.copy_(_local(parameter.grad).reshape(-1))
                parameter.grad = None

    @torch.no_grad()
    def whole(self, *, wanted: bool) -> State | None:
        """A's parameters from all ranks, for those who want them; all ranks call it together.

        It is for scores, so its bytes are not counted as training's.
        """
        sent = self._traffic.sent_bytes
        found = self._layout.new() if wanted else None
        views: Iterable[Tensor | None] = [None] * len(self._parameters) if found is None else found.views.parameters
        for parameter, view in zip(self._parameters, views, strict=True):
            gathered = self._gathered(parameter)
            if view is not None:
                view.copy_(gathered)
        self._traffic.sent_bytes = sent
        return found

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """One parameter, whole: equal parts along its first dim, of which the last may be shorter or missing."""
        size, mine = parameter.shape, _local(parameter.detach())
        most = -(-size[0] // self._ranks)
        padded = mine.new_zeros(most, *size[1:])
        padded[: len(mine)] = mine
        rows = mine.new_empty(self._ranks * most, *size[1:])
        self._traffic.wait(self._traffic.all_gather(rows, padded.view(-1)), "the gathering of A")
        return rows[: size[0]]


class _Gather:
    """The all-gather that torch asks for; over when it returns."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        del group, async_op
        self._traffic.wait(self._traffic.all_gather(output_tensor, input_tensor), "the all-gather of a layer")


class _Sum:
    """The reduce-scatter that torch asks for; over when it returns."""

    def __init__(self, traffic: Traffic, divided: Divided) -> None:
        self._traffic, self._divided = traffic, divided

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
        work = self._traffic.reduce_scatter(input_tensor, output_tensor)
        self._traffic.wait(work, "the reduce-scatter of a layer's gradients")


def _divide(module: nn.Module, mesh: DeviceMesh, gather: Any, total: Any) -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")  # half a second, for those alone who ask for it
    unit: Any = fsdp.fully_shard(module, mesh=mesh)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(total)


def only_buffers(state: State) -> State:
    """What every rank has of A: its running buffers."""
    return State(Layout((), state.layout.buffers), [], state.buffers)


def _as_state(parameters: Sequence[Tensor]) -> State:
    """Divided tensors as a state: this rank's part of each is a vector, and a view is the tensor as torch has it."""
    local = [_local(p) for p in parameters]
    entries = [Entry(str(i), part.shape, 0, part.numel()) for i, part in enumerate(local)]
    layout = Layout(tuple(Block(part.dtype, (e,)) for part, e in zip(local, entries, strict=True)), ())
    return State(layout, [part.view(-1) for part in local], [], Views(list(parameters), []))


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    """This rank's part, where it lies."""
    part: Tensor = tensor.to_local()
    return part
