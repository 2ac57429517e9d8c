"""Digests of Python code and of plain values, for telling one program from another."""

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Code of these is named, not read: their version is compared instead.
_LIBRARIES = {"torch", "numpy", "paceline", *sys.stdlib_module_names}

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def digest_of(values: Iterable[Any]) -> str:
    """Return 12 hexadecimal digits that differ where values or their order do.

    Args:
        values: texts, bytes, tensors on the CPU and arrays.
    """
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            sha.update(f"{list(value.shape)} {value.dtype}".encode())
            value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(value, np.ndarray):
            sha.update(f"{list(value.shape)} {value.dtype}".encode())
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        sha.update(b"%d:" % len(content) + content)
    return sha.hexdigest()[:12]


def value_text(value: Any, depth: int = 8) -> str:
    """Return a plain value as text, and of anything else only the type, as addresses differ between processes.

    >>> value_text((0.9, None, "mean")), value_text(object())
    ("(0.9, None, 'mean')", 'object')
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if depth == 0:  # it may contain itself
        return type(value).__qualname__
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(each, depth - 1) for each in value)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        pairs = (f"{value_text(k, depth - 1)}: {value_text(v, depth - 1)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    # A parameter is trained, so its value says nothing about the program.
    if isinstance(value, (Tensor, np.ndarray)) and not isinstance(value, nn.Parameter) and _readable(value):
        kind = f"{type(value).__name__}{list(value.shape)}"
        return repr(value.item()) if value.ndim == 0 else f"{kind} (digest {digest_of([value])})"
    return type(value).__qualname__


def is_rank(name: str, value: Any) -> bool:
    """Return whether a value says which process this is: it is there for messages, and for what one rank does for all.

    >>> is_rank("local_rank", 1), is_rank("is_main", True), is_rank("steps", 3)
    (True, True, False)
    """
    return isinstance(value, int) and (isinstance(value, bool) or name.lower().endswith("rank"))


def _readable(value: Tensor | np.ndarray) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "O"
    return value.layout == torch.strided and value.device.type == "cpu"


def call_text(function: Any) -> str:
    """Return name and bound arguments of what can be called, as a reader knows it.

    >>> from functools import partial
    >>> call_text(partial(max, default=3)), call_text(lambda x: x)
    ('max(default=3)', '<lambda>')
    """
    if isinstance(function, functools.partial):
        given = [*map(value_text, function.args), *(f"{k}={value_text(v)}" for k, v in function.keywords.items())]
        return f"{call_text(function.func)}({', '.join(given)})"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).removeprefix("<locals>.").rpartition("<locals>.")[2]


def code_digest(*roots: Any) -> str:
    """Return a digest of the bytecode of functions and classes, and of what they use of their own modules.

    Bytecode knows neither comments nor layout nor paths, but differs between versions of Python. Code of libraries and
    code that isn't Python's count by their names.

    Args:
        roots: functions, classes, partials, or objects that can be called.
    """
    seen: set[int] = set()
    return digest_of([text for root in roots for text in _texts(root, seen)])


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield from _texts(value.func, seen)
        for each in (*value.args, *value.keywords.values()):
            yield from _texts(each, seen)
    elif isinstance(value, MethodType):
        yield from _texts(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield from _function(value, seen)
    elif inspect.isclass(value):
        yield from _class(value, seen)
    elif isinstance(value, BuiltinFunctionType) or not callable(value):
        yield value_text(value) if not callable(value) else call_text(value)
    else:
        yield from _class(type(value), seen)
        yield value_text(getattr(value, "__dict__", {}))


def _function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """Yield the texts of a function's code, defaults, closure, and of the globals that it names."""
    if id(function) in seen:
        return
    seen.add(id(function))
    yield call_text(function)
    if _of_library(function):
        return
    yield from _code(function.__code__)
    code, names = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    used = {name: names[name] for name in _names(code) if name in names}
    own = {
        name: value
        for name, value in used.items()
        if not callable(value) or getattr(value, "__module__", None) == function.__module__
    }
    around = [value for name, value in (*closure.items(), *own.items()) if not is_rank(name, value)]
    for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *around):
        yield from _texts(each, seen)


def _class(cls: type, seen: set[int]) -> Iterator[str]:
    """Yield the texts of a class's own methods and plain attributes, and of its bases."""
    if id(cls) in seen:
        return
    seen.add(id(cls))
    yield cls.__qualname__
    if _of_library(cls):
        return
    for name, member in vars(cls).items():
        member = getattr(member, "__func__", getattr(member, "fget", member))  # of a classmethod or a property
        if isinstance(member, FunctionType):
            yield name
            yield from _function(member, seen)
        elif not name.startswith("__"):
            yield f"{name}={value_text(member)}"
    for base in cls.__bases__:
        yield from _class(base, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:  # a set's order differs between processes
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _names(code: CodeType) -> list[str]:
    """Return the globals that code may name, with those of the functions in it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _of_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "builtins")).partition(".")[0] in _LIBRARIES


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False
