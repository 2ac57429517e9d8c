"""Synchronous training under ``shard_parameters=true``: parameters sharded by torch's ``fully_shard`` (FSDP2).

Models and optimizers that it does not suit are refused before anything starts.

::

    forward     for each unit: all-gather of its parameters, its forward, free them
    backward    for each unit: all-gather of its parameters, its backward, reduce-scatter of its gradients, free them

but the last unit, which is the model, stays gathered from its forward to its backward::

    rank 0   n0·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+   statuses of all -> policy
    rank 1   n1·loss --backward--> reduce-scatter of each layer --> its part of Σ n·Δ --+-> the same scale on all,
                                                                                            a step on each part

The number of samples of all ranks is known only in the exchange after backward: so losses are weighted by their own
samples, and the sum is divided then. Each parameter is cut along its first dim. The collectives of torch go through the
run's own communicator, which watches and counts them. The idea: Rajbhandari et al. 2019, arXiv 1910.02054 (ZeRO-3),
and Zhao et al. 2023, arXiv 2304.11277.

::

    model = Sequential(Embedding, Block, Block, ..., Linear)

    Embedding   a unit: gathered before its forward and freed after it; again so in backward
    Block       a unit, with all that is in it
    Linear      a unit
    model       the last unit: what is in no other

A unit must own what it gathers: no other module's forward may use it. So a tied weight belongs to the smallest unit
that contains all its uses, and torch's MultiheadAttention, which reads the weight of a member without calling it, is
never divided. It is no unit either: it returns a view, and torch 2.13 warns that a unit's view must not be written.
"""

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.checkpoint.base import TensorChunk
from paceline.core.errors import InputError
from paceline.device import CPU, placed
from paceline.engine.spmd.communicator import Communicator
from paceline.program import Program
from paceline.replica.flat_state import DtypeBuffer, FlatLayout, FlatState, TensorEntry, Views, finite
from paceline.replica.late_figures import largest, zero_nonfinite
from paceline.replica.optimizer_factory import ELEMENTWISE, build_optimizer

# Optimizers that treat each element alone, so that a step on each shard is a step on the whole parameter.
#
# Others fail on torch's DTensors (2.13: Adafactor, and optimizers that mix them with tensors of their own, such as LARS
# and LAMB), or compute something else there (Muon: 0.01 apart after 13 steps of 0.01).
_ELEMENTWISE = (
    *ELEMENTWISE,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)


def refuse_model(program: Program) -> None:
    """Raise InputError if ``shard_parameters=true`` can't shard this model or its optimizer among ranks."""
    module = program.build()
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise InputError(
                f"{name or 'the model'} has sparse gradients, which shard_parameters=True can't sum; write "
                "nn.Embedding(…, sparse=False)"
            )
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise InputError(
                f"parameter {name} is a single number, and shard_parameters=True cuts parameters along their first "
                "dim; write torch.nn.Parameter(torch.ones(1)), or shard_optimizer=true instead"
            )
    # A parameter that several units share is summed with the first of them.
    seen: set[int] = set()
    for unit in units(module):
        own = {n: p for n, p in unit.named_parameters() if p.requires_grad and id(p) not in seen}
        seen.update(map(id, own.values()))
        dtypes = {str(p.dtype).removeprefix("torch."): name for name, p in own.items()}
        if len(dtypes) > 1:
            listing = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise InputError(
                f"shard_parameters=True sums all gradients of {type(unit).__name__} in one go, but they have several "
                f"dtypes ({listing}); put them into layers of their own in an nn.Sequential, or write "
                "shard_optimizer=true"
            )
    optimizer = build_optimizer(program.optimizer, [p for p in module.parameters() if p.requires_grad])
    if type(optimizer) not in _ELEMENTWISE:
        accepted = ", ".join(sorted(kind.__name__ for kind in _ELEMENTWISE))
        raise InputError(
            f"shard_parameters=True gives each rank a part of each parameter, and {type(optimizer).__name__} may have "
            f"to look at the whole; write shard_optimizer=true instead, or one of torch.optim's {accepted}"
        )


# Modules that only contain others: their members are the layers of a model, between which it is natural to cut it.
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# Modules that stay part of the unit around them.
_WHOLE = (nn.MultiheadAttention,)

# Share of all parameters from which on a member of a list is worth a gather of its own.
LAYER = 1 / 256

# Share of all parameters from which on any other module is.
LARGE = 1 / 8


def units(module: nn.Module) -> list[nn.Module]:
    """Return the FSDP units of a module, inner ones first; the last is the module itself.

    A member of a list with 1/256 of all bytes, and any other module with 1/8, is a unit, if no module outside can read
    its parameters in forward. Parameters of units inside it do not count.

    >>> model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Linear', 'Sequential']
    >>> model[2].weight = nn.Linear(8, 3).weight
    >>> model.append(nn.Linear(8, 3))[3].weight = model[2].weight     # tied: only the whole contains both its layers
    >>> [type(unit).__name__ for unit in units(model)]
    ['Linear', 'Sequential']
    """
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    total = sum(p.nbytes for p in module.parameters())
    covered: set[int] = set()
    result = []
    for inner, is_member in _callable_modules(module, set()):
        own = Counter(id(p) for _, p in inner.named_parameters(remove_duplicate=False) if id(p) not in covered)
        nbytes = sum(p.nbytes for p in inner.parameters() if id(p) in own)
        closed = all(uses[key] == count for key, count in own.items())
        if closed and own and nbytes >= total * (LAYER if is_member else LARGE):
            result.append(inner)
            covered.update(own)
    return [*result, module]


def _callable_modules(module: nn.Module, seen: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield all inner modules with a forward of their own, children first, and whether each is a member of a list."""
    for child in module.children():
        if id(child) not in seen and not isinstance(child, _WHOLE):
            seen.add(id(child))
            yield from _callable_modules(child, seen)
            if type(child).forward is not nn.Module.forward and not isinstance(child, _LISTS):
                yield child, isinstance(module, _LISTS)


class FsdpModule:
    """One rank's part of a module's parameters, and of the sum of all ranks' gradients.

    Args:
        module: whole, with the values of A_0; it is changed in place.
        layout: of A.
        rank: this one's number.
        ranks: number of ranks.
        communicator: of all ranks.
        device: on which they are.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        rank: int,
        ranks: int,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._layout, self._rank, self._ranks, self._communicator = layout, rank, ranks, communicator
        self._entries = [entry for block in layout.parameters for entry in block.entries]
        self.absent = False
        """Whether this rank makes a shadow pass: its gradients don't count."""
        self.late = False
        """Whether loss and finite stay on the device for now: ``Measured.late``."""
        self._finite, self.largest = True, list[Tensor]()
        """What is known of this rank's gradients; on a device the largest element of each layer's, read once."""
        fsdp = importlib.import_module("torch.distributed.fsdp")  # half a second, only where FSDP is used
        placed(module, device=device)
        mesh = DeviceMesh.from_group(communicator.group.handle, device.type)
        gather, reduce_scatter = _AllGather(communicator, self), _ReduceScatter(communicator, self)
        for unit in units(module):
            sharded: Any = fsdp.fully_shard(unit, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_all_gather(gather)
            sharded.set_custom_reduce_scatter(reduce_scatter)
        named = dict(module.named_parameters())
        self._parameters = [named[e.name] for block in layout.parameters for e in block.entries]
        self.shard = _as_state([p.detach() for p in self._parameters])
        """This rank's part of A, one vector for each parameter: views of what the module gathers."""
        self.gradient = _as_state([torch.zeros_like(p.detach()) for p in self._parameters])
        """This rank's part of the sum of all gradients, after :meth:`take_gradients`."""

    def begin_delta(self) -> None:
        """Begin a new Δ."""
        self._finite, self.largest = True, []

    def note(self, gradients: Tensor) -> None:
        """Note gradients of this rank; those that are not finite count as 0 where that is read late."""
        if gradients.device == CPU:
            self._finite = finite([gradients], 0.0) and self._finite
        else:
            self.largest.append(largest([gradients]))
        if self.late:
            zero_nonfinite([gradients])

    def all_finite(self) -> bool:
        """Return whether all gradients noted since :meth:`begin_delta` are finite; waits for a device."""
        if self.largest:
            self._communicator.reached("the gradients of all layers")
            self._finite = all(map(math.isfinite, torch.stack(self.largest).tolist()))
        return self._finite

    def take_gradients(self) -> list[Tensor]:
        """Move the gradients out of the module and return them as vectors; zeros where a parameter has none."""
        for parameter, vector in zip(self._parameters, self.gradient.parameters, strict=True):
            if parameter.grad is None:
                vector.zero_()
            else:
                vector.copy_(_local(parameter.grad).reshape(-1))
                parameter.grad = None
        return self.gradient.parameters

    def chunks(self) -> list[TensorChunk]:
        """Return this rank's part of A."""
        parts = zip(self.shard.layout.parameters, self.shard.parameters, strict=True)
        return [c for block, vector in parts for c in self.describe("", block.entries[0], block.views(vector)[0])]

    def describe(self, prefix: str, entry: TensorEntry, tensor: Tensor) -> Iterator[TensorChunk]:
        """Yield the chunk of a tensor of the shape of this rank's part of a parameter."""
        whole, local = self._entries[int(entry.name)], _local(tensor) if hasattr(tensor, "to_local") else tensor
        first = self._rank * -(-whole.shape[0] // self._ranks)
        if local.numel():
            offset = (first, *(0 for _ in whole.shape[1:]))
            yield TensorChunk(prefix + whole.name, tuple(whole.shape), offset, local)

    @torch.no_grad()
    def full_state(self, running: FlatState, *, wanted: bool) -> FlatState | None:
        """Gather A, of which ``running`` has the running buffers, where it is wanted; all ranks call it together."""
        sent = self._communicator.traffic.sent_bytes
        full = self._layout.new(device=running.device) if wanted else None
        views: Iterable[Tensor | None] = [None] * len(self._parameters) if full is None else full.views.parameters
        for parameter, view in zip(self._parameters, views, strict=True):
            # Equal parts along the first dim, of which the last may be shorter or empty.
            shape, own = parameter.shape, _local(parameter.detach())
            rows = -(-shape[0] // self._ranks)
            padded = own.new_zeros(rows, *shape[1:])
            padded[: len(own)] = own
            gathered = own.new_empty(self._ranks * rows, *shape[1:])
            work = self._communicator.all_gather(gathered, padded.view(-1))
            self._communicator.finish(work, gathered, "the gathering of A")
            if view is not None:
                view.copy_(gathered[: shape[0]])
        self._communicator.traffic.sent_bytes = sent  # it is for evaluation: not counted as training's
        if full is not None:
            for buffer, value in zip(full.buffers, running.buffers, strict=True):
                buffer.copy_(value)
        return full


@dataclass(frozen=True)
class _Collective:
    """A collective that torch calls, also with arguments that are its own affair; complete when it returns."""

    _communicator: Communicator
    _module: FsdpModule

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        work = self._communicator.all_gather(output_tensor, input_tensor)
        self._communicator.finish(work, output_tensor, "the all-gather of a layer")


class _ReduceScatter(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> None:
        if self._module.absent:
            input_tensor.zero_()
        else:
            self._module.note(input_tensor)
        work = self._communicator.reduce_scatter(input_tensor, output_tensor)
        self._communicator.finish(work, output_tensor, "the reduce-scatter of a layer's gradients")


def _as_state(parameters: Sequence[Tensor]) -> FlatState:
    """Wrap DTensors as a state: this rank's part of each is a vector, and a view is the tensor as torch has it."""
    local = [_local(p) for p in parameters]
    entries = [TensorEntry(str(i), part.shape, 0, part.numel()) for i, part in enumerate(local)]
    layout = FlatLayout(tuple(DtypeBuffer(part.dtype, (e,)) for part, e in zip(local, entries, strict=True)), ())
    return FlatState(layout, [part.view(-1) for part in local], [], _views=Views(list(parameters), []))


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local()
    return part
