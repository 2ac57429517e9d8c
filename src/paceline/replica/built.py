"""A model made where there may be no memory for all of it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from paceline.comm.spill import Spill
from paceline.program import Program


def built(program: Program, spill: Spill) -> nn.Module:
    """The module with A_0: the same bits as ``program.build()`` gives, and the same objects refer to each other.

    A tensor moves as soon as a module is given it, so at no time there is more in ordinary memory than one tensor and
    what ``spill`` leaves there. What somebody else still refers to stays where it is.
    """
    with _told(spill):
        module = program.build()
    spill.settle()
    return module


@contextlib.contextmanager
def _told(spill: Spill) -> Iterator[None]:
    """While it is entered, every tensor that any module is given goes by ``spill``."""

    def move(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        del module, name
        if tensor is not None and _movable(tensor):
            tensor.data = spill.kept(tensor.data)

    hooks = register_module_parameter_registration_hook(move), register_module_buffer_registration_hook(move)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _movable(tensor: Tensor) -> bool:
    """Whether it is a plain tensor on the CPU that has its memory for itself."""
    if type(tensor) not in (nn.Parameter, Tensor) or is_lazy(tensor):
        return False
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        return False
    storage = tensor.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor, and ``storage``
    return alone and storage.nbytes() == tensor.nbytes
