"""Where a full name leads in a module."""

from torch import nn


def home(module: nn.Module, path: str) -> nn.Module:
    """The submodule of this full name; made where there is none."""
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
