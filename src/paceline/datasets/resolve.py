"""Load PROGRAM: a built-in name, ``file.py:name`` or ``package.module:name``; no torch until a program is loaded."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from paceline.core.errors import InputError, unknown
from paceline.core.program_import import importing

if TYPE_CHECKING:
    from paceline.program import Program

# Built-in name -> module:function; each function is (*, data: Path | None, seed: int) -> Program.
PROGRAMS = {
    "cifar10": "paceline.datasets.cifar10:cifar10",
    "digits": "paceline.datasets.digits:digits",
    "fashion-mnist": "paceline.datasets.mnist:fashion_mnist",
    "mnist": "paceline.datasets.mnist:mnist",
    "shakespeare": "paceline.datasets.shakespeare:shakespeare",
    "synthetic": "paceline.datasets.synthetic:synthetic",
}

T = TypeVar("T")


def load_program(
    name: str, *, data: Path | None = None, seed: int | None = None, batch_size: int | None = None
) -> "Program":
    """Return the program that PROGRAM names.

    Args:
        name: a built-in name (the keys of ``PROGRAMS``), or ``file.py:name`` or ``package.module:name`` of a Program or
            of a function without arguments that returns one.
        data: folder of a built-in set's standard files.
        seed: replaces the program's own; a built-in one has 0.
        batch_size: samples per replica and micro-step; replaces the program's own batch size, global or not.

    Raises:
        InputError: there is no such program, its files are absent or damaged, or its code raises.

    >>> load_program("digit")
    Traceback (most recent call last):
    paceline.core.errors.InputError: unknown program 'digit'; did you mean 'digits'? Known: cifar10, digits, ...
    """
    refuse_unknown(name)
    if ":" in name:
        program = _user_program(name, data)
    else:
        module, _, function = PROGRAMS[name].partition(":")
        make: Callable[..., Program] = getattr(importlib.import_module(module), function)
        program = make(data=data, seed=seed or 0)
    if seed is not None:
        program = program.seeded(seed)
    if batch_size is not None:
        program = replace(program, batch_size=batch_size, global_batch_size=None)
    return program


def refuse_unknown(name: str) -> None:
    """Raise InputError if PROGRAM names none, as far as that is known before it is loaded; it imports no torch."""
    source, colon, attribute = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise InputError(f"{name!r} names a file but not what to take from it; write {name}:NAME")
        if name not in PROGRAMS:
            raise unknown("program", name, PROGRAMS)
    elif not source or not attribute:
        raise InputError(f"{name!r} lacks a part of file.py:name; write it as train.py:program, say")
    elif source.endswith(".py") and not (path := Path(source).expanduser().resolve()).is_file():
        raise InputError(
            f"there is no file {path}; write the path of the file that makes the Program, as in train.py:program"
        )


def _user_program(name: str, data: Path | None) -> "Program":
    from paceline.program import Program

    source, _, attribute = name.rpartition(":")
    if data is not None:
        raise InputError(f"{name!r} is called with no arguments, so data={str(data)!r} can't reach it; leave it out")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    if not hasattr(module, attribute):
        # The programs in the module, and the functions that it defines itself.
        candidates = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Program) or (callable(value) and getattr(value, "__module__", None) == module.__name__)
        ]
        raise unknown(f"name in {source}:", attribute, candidates)
    value = getattr(module, attribute)
    if not isinstance(value, Program) and callable(value):
        value = _guarded(f"calling {name}()", value)
    if not isinstance(value, Program):
        raise InputError(
            f"{name} is of type {type(value).__name__}; it must be a Program or a function that returns one; "
            "write program = Program(...)"
        )
    return value


def _import_module(name: str) -> ModuleType:
    # As ``python -m`` does; for an entry point sys.path begins with the folder of the script instead.
    _add_to_path(Path.cwd())
    try:
        with importing(name):
            return _guarded(f"importing {name}", lambda: importlib.import_module(name))
    except InputError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            raise InputError(
                f"there is no module {cause.name!r} on sys.path; write package.module:name of an installed one, "
                "or file.py:name"
            ) from None
        raise


def _import_file(path: Path) -> ModuleType:
    import cloudpickle

    path = path.expanduser().resolve()
    # The digest of the path keeps apart files of one name in different folders.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"paceline_program_{path.stem}_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _add_to_path(path.parent)
    sys.modules[module.__name__] = module
    execute = spec.loader.exec_module
    try:
        with importing(str(path)):
            _guarded(f"importing {module.__file__}", lambda: execute(module))
    except InputError:
        del sys.modules[module.__name__]
        raise
    # Workers can't import a module of this name, so its functions are sent to them as code.
    cloudpickle.register_pickle_by_value(module)
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded(doing: str, function: Callable[[], T]) -> T:
    """Return ``function()``; chain its error to an InputError that ends as the traceback does."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise InputError(f"{doing} failed: {type(error).__name__}: {error}") from error
