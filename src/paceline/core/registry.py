"""Families of classes that have names: policies, thresholds, schedules, compressions, engines.

A *family* is the base class of interchangeable values, with the word for them in messages. A class joins its family
in the file in which it is written, so a new policy is one file and nothing else::

    @declare("aggregation")                    # once, over the base class
    class Aggregation(ABC): ...

    @register("my-policy")
    @dataclass(frozen=True)
    class MyPolicy(Aggregation[State]):
        patience: int = 3                      # text form: my-policy:patience=5

A name, its options and back: ``core/text_form.py``. No family is known here; each declares itself.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

from paceline.core.errors import InputError, unknown

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class TextOption(NamedTuple):
    """One option of a registered class."""

    hint: Any
    """Its type."""
    default: Any
    """``inspect.Parameter.empty`` if it must be given."""


@dataclass(frozen=True)
class RegisteredClass:
    """A name of the text form: the class that it stands for, and the fields that the name itself settles."""

    name: str
    cls: type[Any]
    fixed: Mapping[str, Any]

    def options(self) -> Mapping[str, TextOption]:
        """Return what may be written after the colon, in the constructor's order."""
        try:
            hints = get_type_hints(self.cls.__init__)
        except NameError as error:
            raise InputError(
                f"{self.cls.__name__} has a field whose type names {error.name!r}, which its module does not have; "
                "import or define it there, and not under TYPE_CHECKING alone."
            ) from error
        # callable: of a class that came from another process, MISSING is another object than here.
        factories = {f.name: f.default_factory for f in fields(self.cls) if callable(f.default_factory)}
        return {
            p.name: TextOption(hints[p.name], factories[p.name]() if p.name in factories else p.default)
            for p in signature(self.cls).parameters.values()
            if p.name not in self.fixed
        }


@dataclass(frozen=True)
class Family:
    """Classes that have one base, by name."""

    word: str
    """For messages: "aggregation", "engine"."""
    values: bool = True
    """Whether its classes are frozen dataclasses, whose fields are options of the text form."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules that are imported only when their name is asked for; each registers a class under that name."""
    entries: dict[str, RegisteredClass] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the sorted names; imports nothing."""
        return sorted({*self.entries, *self.modules})

    def entry(self, name: str) -> RegisteredClass:
        """Return the class of a name, importing its module if need be; InputError with the nearest name if none is."""
        if name not in self.entries:
            if name not in self.modules:
                raise unknown(self.word, name, self.names())
            import_module(self.modules[name])
        return self.entries[name]


_FAMILIES: dict[type[Any], Family] = {}


def declare(family: Family | str) -> Callable[[type[T]], type[T]]:
    """Make a class the base of a family of its own, which is given whole or by its word."""

    def decorate(base: type[T]) -> type[T]:
        _FAMILIES[base] = Family(family) if isinstance(family, str) else family
        return base

    return decorate


def modules_in_folders(package: str, module: str) -> dict[str, str]:
    """Find the folders of a package that have a certain module, without importing any of them.

    Returns:
        The folders' names and the full names of their modules.

    >>> modules_in_folders("paceline.engine", "engine")["local"]
    'paceline.engine.local.engine'
    """
    spec = find_spec(package)
    assert spec is not None
    files = (file for path in spec.submodule_search_locations or () for file in Path(path).glob(f"*/{module}.py"))
    return {file.parent.name: f"{package}.{file.parent.name}.{module}" for file in files}


def register(name: str, **fixed: Any) -> Callable[[type[T]], type[T]]:
    """Give a class its name in its family; if it is a value, a frozen dataclass, its fields become the options.

    Args:
        name: lower-case words joined by hyphens.
        fixed: fields that the name settles, so that one class may have several names.

    Raises:
        InputError: the name is malformed or taken, or the class is no frozen dataclass of a known family.
    """

    if not isinstance(name, str):
        raise InputError("@register has no name to give; write @register('my-policy') over the class.")

    def decorate(cls: type[T]) -> type[T]:
        family = family_of(cls)
        value = is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if family is None or (family.values and not value):
            raise InputError(
                f"{cls.__name__} can't be registered as {name!r}: it must be a frozen dataclass of a known kind; "
                f"write @dataclass(frozen=True) under @register, and class {cls.__name__}(Aggregation[State])."
            )
        if not _NAME.fullmatch(name):
            raise InputError(f"the name {name!r} must be lower-case words joined by hyphens; write 'my-policy'.")
        taken = family.entries.get(name)
        # A notebook cell that is run again defines the same class anew.
        if taken and (taken.cls.__module__, taken.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f"the {family.word} {name!r} is {taken.cls.__module__}.{taken.cls.__qualname__} already; "
                f"write another name for {cls.__module__}.{cls.__qualname__}."
            )
        family.entries[name] = RegisteredClass(name, cls, fixed)
        return cls

    return decorate


def family_of(hint: Any) -> Family | None:
    """Return the family of a class, or of an annotation such as ``Aggregation[Any]``."""
    cls = get_origin(hint) or hint
    return next((_FAMILIES[c] for c in cls.__mro__ if c in _FAMILIES), None) if isinstance(cls, type) else None


def entry_of(value: object) -> RegisteredClass | None:
    """Return the name, with its class, under which ``value`` is printed; None if it has none."""
    family = family_of(type(value))
    for entry in family.entries.values() if family else ():
        if type(value) is entry.cls and all(getattr(value, k) == v for k, v in entry.fixed.items()):
            return entry
    return None


def own_entries(*values: object) -> tuple[RegisteredClass, ...]:
    """Return the names, with their classes, of values and of the values in their fields, without the package's own."""
    package, found, left = __name__.partition(".")[0], list[RegisteredClass](), [*values]
    while left:
        value = left.pop()
        if (entry := entry_of(value)) is None:
            continue
        if entry.cls.__module__.partition(".")[0] != package:
            found.append(entry)
        left += [getattr(value, f.name) for f in fields(entry.cls)]
    return tuple(found)


def register_entries(entries: Iterable[RegisteredClass]) -> None:
    """Register classes that another process has registered, as :func:`register` does; again, it changes nothing."""
    for entry in entries:
        register(entry.name, **entry.fixed)(entry.cls)


def registered(base: type[Any]) -> Mapping[str, type[Any]]:
    """Return every registered name of a family and its class.

    >>> from paceline.aggregation import Aggregation
    >>> "smooth-switch" in registered(Aggregation)
    True
    """
    return {name: entry.cls for name, entry in _FAMILIES[base].entries.items()}
