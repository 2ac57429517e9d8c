"""PROGRAM: a built-in name, ``file.py:name`` or ``package.module:name``. No torch until a program is loaded."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import InputError, unknown

if TYPE_CHECKING:
    from paceline.program import Program

PROGRAMS = {
    "cifar10": "paceline.datasets.cifar10:cifar10",
    "digits": "paceline.datasets.digits:digits",
    "fashion-mnist": "paceline.datasets.mnist:fashion_mnist",
    "mnist": "paceline.datasets.mnist:mnist",
    "shakespeare": "paceline.datasets.shakespeare:shakespeare",
    "synthetic": "paceline.datasets.synthetic:synthetic",
}
"""Built-in name -> ``module:function``; each function is ``(*, data: Path | None, seed: int) -> Program``."""

T = TypeVar("T")


def load_program(
    name: str, *, data: Path | None = None, seed: int | None = None, batch_size: int | None = None
) -> "Program":
    """The program that PROGRAM names.

    Args:
        name: a built-in name (the keys of ``PROGRAMS``), or ``file.py:name`` or ``package.module:name`` of a Program or
            of a function without arguments that returns one.
        data: the folder with a built-in set's standard files.
        seed: in place of the program's own; a built-in one has 0.
        batch_size: samples per replica and micro-step, in place of the program's own batch size, global or not.

    Raises:
        InputError: where there is no such program, its files are absent or damaged, or its code raises.

    >>> load_program("digit")
    Traceback (most recent call last):
    paceline.core.errors.InputError: unknown program 'digit'; did you mean 'digits'? Known: cifar10, digits, ...
    """
    program = _own(name, data) if ":" in name else _builtin(name, data, seed or 0)
    if seed is not None:
        program = program.seeded(seed)
    if batch_size is not None:
        program = replace(program, batch_size=batch_size, global_batch_size=None)
    return program


def _builtin(name: str, data: Path | None, seed: int) -> "Program":
    if name not in PROGRAMS:
        if name.endswith(".py"):
            raise InputError(f"{name!r} names a file but not what to take from it; write {name}:NAME")
        raise unknown("program", name, PROGRAMS)
    module, _, function = PROGRAMS[name].partition(":")
    make: Callable[..., Program] = getattr(importlib.import_module(module), function)
    return make(data=data, seed=seed)


def _own(name: str, data: Path | None) -> "Program":
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{name!r} lacks a part of file.py:name; write it as train.py:program, say")
    if data is not None:
        raise InputError(f"{name!r} is called with no arguments, so data={str(data)!r} can't reach it; leave it out")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    return _program(name, _attribute(module, where, attribute))


def _program(name: str, value: Any) -> "Program":
    from paceline.program import Program

    if not isinstance(value, Program) and callable(value):
        value = _guarded(f"calling {name}()", value)
    if not isinstance(value, Program):
        raise InputError(
            f"{name} is of type {type(value).__name__}; it must be a Program or a function that returns one; "
            "write program = Program(...)"
        )
    return value


def _attribute(module: ModuleType, where: str, attribute: str) -> Any:
    if not hasattr(module, attribute):
        raise unknown(f"name in {where}:", attribute, _candidates(module))
    return getattr(module, attribute)


def _candidates(module: ModuleType) -> list[str]:
    """The programs in it, and the functions it defines itself."""
    from paceline.program import Program

    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Program) or (callable(value) and getattr(value, "__module__", None) == module.__name__)
    ]


def _from_name(name: str) -> ModuleType:
    # As ``python -m`` does; an entry point's own folder is there instead.
    _on_path(Path.cwd())
    try:
        return _guarded(f"importing {name}", lambda: importlib.import_module(name))
    except InputError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            raise InputError(
                f"there is no module {cause.name!r} on sys.path; write package.module:name of an installed one, "
                "or file.py:name"
            ) from None
        raise


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise InputError(
            f"there is no file {path}; write the path of the file that makes the Program, as in {_EXAMPLE}"
        )
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"paceline_program_{path.stem}_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _on_path(path.parent)
    _execute(module, spec.loader.exec_module)
    return module


def _execute(module: ModuleType, run: Callable[[ModuleType], None]) -> None:
    """Runs the file's code; its functions then travel to workers as code, for they can't import this module's name."""
    import cloudpickle

    sys.modules[module.__name__] = module
    try:
        _guarded(f"importing {module.__file__}", lambda: run(module))
    except InputError:
        del sys.modules[module.__name__]
        raise
    cloudpickle.register_pickle_by_value(module)


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded(doing: str, function: Callable[[], T]) -> T:
    """``function()``; what it raises is chained to an InputError that ends as its traceback does."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{doing} failed: {type(error).__name__}: {error}") from error


_EXAMPLE = "train.py:program"
