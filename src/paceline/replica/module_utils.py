"""Modules: find one by full name, build one within bounded memory, try one out without leaving a trace.

A model made where there may be no memory for all of it.

Trying a model out without leaving a trace on it or on torch's random numbers.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from paceline.comm.shared_memory import SpillAllocator
from paceline.program import Program


def home(module: nn.Module, path: str) -> nn.Module:
    """The submodule of this full name; made where there is none."""
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def materialize(program: Program, spill: SpillAllocator) -> nn.Module:
    """The module with A_0: the same bits as ``program.build()`` gives, and the same objects refer to each other.

    A tensor moves as soon as a module is given it, so at no time there is more in ordinary memory than one tensor and
    what ``spill`` leaves there. What somebody else still refers to stays where it is.
    """
    with _told(spill):
        module = program.build()
    spill.settle()
    return module


@contextlib.contextmanager
def _told(spill: SpillAllocator) -> Iterator[None]:
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


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, each under the first of its names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def preserve_state(module: nn.Module, *, training: bool = True) -> Iterator[None]:
    """While it is entered the model is in training mode, or in evaluation mode; after it, all is as it was.

    That is: torch's generators, the modes and attributes of all its modules, the lists and dicts among them too, and
    what :func:`rewound` rewinds.
    """
    attributes = [(vars(part), _copied(vars(part))) for part in module.modules()]
    with rewound(module):
        try:
            module.train(training)
            yield
        finally:
            for own, saved in attributes:
                _restore(own, saved)


@contextmanager
def rewound(module: nn.Module, others: Mapping[str, Tensor] | None = None, *, seed: int = 0) -> Iterator[None]:
    """One run of a model under ``seed``, after which its buffers, its tensors that are plain attributes, and ``others``
    are and hold what they did, and torch's generators go on where they were.
    """
    cards = sorted({t.device.index for t in tensors_of(module).values() if t.device.type == "cuda"})
    plain = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    values = [(t, t.detach().clone()) for t in (*module.buffers(), *plain, *(others or {}).values())]
    buffers = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    with torch.random.fork_rng(devices=cards), torch.enable_grad():
        _seed(seed, cards)
        try:
            yield
        finally:
            for own, saved in buffers:
                own.update(saved)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)


def _seed(seed: int, cards: list[int]) -> None:
    torch.default_generator.manual_seed(seed)
    for card in cards:
        with torch.cuda.device(card):
            torch.cuda.manual_seed(seed)


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value, and what is in it where it is a list or a dict, as those of parameters and children are."""
    return {key: (value, value.copy() if type(value) in (list, dict) else None) for key, value in attributes.items()}


def _restore(own: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    own.clear()
    own.update({key: value for key, (value, _) in saved.items()})
    for value, content in saved.values():
        if isinstance(content, list):
            value[:] = content
        elif isinstance(content, dict):
            value.clear()
            value.update(content)
