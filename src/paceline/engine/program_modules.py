"""The installed modules that a program needs, for a fork server to import once instead of every worker."""

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from paceline.core.errors import is_installed
from paceline.program import Program

# What fork servers have imported anyway.
_OURS = ("torch", "paceline", "numpy")


def program_modules(program: Program, module: nn.Module) -> tuple[str, ...]:
    """Return the installed modules that a worker will import for a program.

    These are the modules of the model's classes, and those that the program's functions and data refer to. The user's
    own files are left to the workers: they may be edited between two runs, and importing them may do anything. What
    they refer to at their top is among the result.

    Args:
        program: was imported in this process.
        module: its model.
    """
    parts = (program.model, program.loss, program.optimizer, program.scheduler, program.train, program.test)
    values = (*parts, *(program.metrics or {}).values(), *program.loader.values())
    named = {name for value in values for name in _referred(value)} | {type(m).__module__ for m in module.modules()}
    own = [sys.modules[name] for name in named if name in sys.modules and not _installed(name) and not _pythons(name)]
    named |= {name for file in own for value in vars(file).values() for name in _named(value)}
    return tuple(sorted(name for name in named if _installed(name) and name.partition(".")[0] not in _OURS))


def _referred(value: Any) -> Iterator[str]:
    """Yield the module of a function or of an object's class, and those of the globals that the function names."""
    while isinstance(value, functools.partial):
        value = value.func
    yield from _named(value if isinstance(value, (FunctionType, type)) else type(value))
    if isinstance(value, FunctionType):
        for name in value.__code__.co_names:
            yield from _named(value.__globals__.get(name))


def _named(value: Any) -> Iterator[str]:
    """Yield the name of a module, or of that of a function or class."""
    name = value.__name__ if isinstance(value, ModuleType) else None
    if isinstance(value, (FunctionType, type)):
        name = value.__module__
    if isinstance(name, str):
        yield name


def _pythons(name: str) -> bool:
    """Return whether a module comes with Python, or is the script that was started."""
    return name == "__main__" or name.partition(".")[0] in sys.stdlib_module_names


def _installed(name: str) -> bool:
    """Return whether a module that was imported by this name is a part of an installed package."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None) or ""
    return getattr(spec, "name", None) == name and is_installed(origin)
