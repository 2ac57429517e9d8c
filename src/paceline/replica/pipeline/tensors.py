"""The tensors of several parts as those of one module, each under its full name."""

from collections.abc import Iterable

from torch import Tensor, nn

from paceline.replica.naming import home
from paceline.replica.pipeline.base import Part


def together(parts: Iterable[Part]) -> nn.Module:
    """A module without a forward that holds what the parts hold; a name that several have is one tensor from now on."""
    whole = nn.Module()
    for part in parts:
        for name, parameter in list(part.module.named_parameters()):
            _share(whole, part.module, name, parameter)
        for name, buffer in list(part.module.named_buffers()):
            _share(whole, part.module, name, buffer)
    return whole


def _share(whole: nn.Module, part: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    where = home(whole, path)
    if leaf in where._parameters or leaf in where._buffers:
        setattr(part.get_submodule(path), leaf, getattr(where, leaf))
    elif isinstance(tensor, nn.Parameter):
        where.register_parameter(leaf, tensor)
    else:
        where.register_buffer(leaf, tensor)
