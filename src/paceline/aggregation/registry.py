"""Which classes have a name in the text form.

A *kind* is a family of interchangeable values: policies, thresholds, outer optimizers. A class joins its family in the
file where it is written, so a new policy is one file and nothing else::

    @register("my-policy")
    @dataclass(frozen=True)
    class MyPolicy(Aggregation[State]):
        patience: int = 3                      # text form: my-policy:patience=5

What an option may be: each check raises InputError with the value, the rule and a line that keeps it.

``name`` is what stands before the ``=`` in the text form, so that the line in the message can be written as it is.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_origin, get_type_hints

from paceline.aggregation.base import Aggregation
from paceline.core.errors import InputError, unknown

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Option(NamedTuple):
    """One option of a registered class."""

    hint: Any
    """Its type."""
    default: Any
    """``inspect.Parameter.empty`` where it must be given."""


@dataclass(frozen=True)
class Entry:
    """A name of the text form: the class it stands for, and the fields that the name itself settles."""

    name: str
    cls: type[Any]
    fixed: Mapping[str, Any]

    def options(self) -> Mapping[str, Option]:
        """What may be written after the colon, in the constructor's order."""
        hints = get_type_hints(self.cls.__init__)
        kept = {f.name: f for f in fields(self.cls)}
        parameters = [p for p in signature(self.cls).parameters.values() if p.name not in self.fixed]
        return {p.name: Option(hints[p.name], _default(p, kept[p.name])) for p in parameters}

    def means(self, value: object) -> bool:
        """Whether ``value`` is of this class and has what the name settles."""
        return type(value) is self.cls and all(getattr(value, k) == v for k, v in self.fixed.items())


@dataclass(frozen=True)
class Kind:
    """A family of registered classes; ``word`` names it in messages."""

    word: str
    entries: dict[str, Entry] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """The entry of a name; InputError with the nearest name where there is none."""
        if name not in self.entries:
            raise unknown(self.word, name, self.entries)
        return self.entries[name]


_KINDS: dict[type[Any], Kind] = {Aggregation: Kind("aggregation")}


def declare(word: str) -> Callable[[type[T]], type[T]]:
    """Make a class the base of a kind of its own."""

    def decorate(base: type[T]) -> type[T]:
        _KINDS[base] = Kind(word)
        return base

    return decorate


def register(name: str, **fixed: Any) -> Callable[[type[T]], type[T]]:
    """Give a frozen dataclass its name in the text form; its fields become the options.

    Args:
        name: lower-case words joined by hyphens.
        fixed: fields that the name settles, so that one class may have several names.

    Raises:
        InputError: the name is malformed or taken, or the class is no frozen dataclass of a known kind.
    """

    def decorate(cls: type[T]) -> type[T]:
        kind = kind_of(cls)
        if kind is None or not (is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            raise InputError(
                f"{cls.__name__} can't be registered as {name!r}: it must be a frozen dataclass of a known kind; "
                f"write @dataclass(frozen=True) under @register, and class {cls.__name__}(Aggregation[State])."
            )
        _refuse_name(kind, name, cls)
        kind.entries[name] = Entry(name, cls, fixed)
        return cls

    return decorate


def _refuse_name(kind: Kind, name: str, cls: type[Any]) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"the name {name!r} must be lower-case words joined by hyphens; write 'my-policy'.")
    taken = kind.entries.get(name)
    # A notebook cell that is run again defines the same class anew.
    if taken and (taken.cls.__module__, taken.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InputError(
            f"the {kind.word} {name!r} is {taken.cls.__module__}.{taken.cls.__qualname__} already; "
            f"write another name for {cls.__module__}.{cls.__qualname__}."
        )


def kind_of(hint: Any) -> Kind | None:
    """The kind that a class, or an annotation such as ``Aggregation[Any]``, belongs to."""
    cls = get_origin(hint) or hint
    return next((_KINDS[base] for base in cls.__mro__ if base in _KINDS), None) if isinstance(cls, type) else None


def entry_of(value: object) -> Entry | None:
    """The entry that says ``value`` in text."""
    kind = kind_of(type(value))
    return next((e for e in kind.entries.values() if e.means(value)), None) if kind else None


def registered(base: type[Any] = Aggregation) -> Mapping[str, type[Any]]:
    """Every registered name of a kind and its class.

    >>> "smooth-switch" in registered()
    True
    """
    return {name: entry.cls for name, entry in _KINDS[base].entries.items()}


def _default(parameter: Parameter, kept: Field[Any]) -> Any:
    return parameter.default if kept.default_factory is MISSING else kept.default_factory()


def whole(name: str, value: object, *, least: int) -> None:
    """``value`` must be an int of at least ``least``.

    >>> whole("buffered:k", 0, least=1)
    Traceback (most recent call last):
    paceline.core.errors.InputError: buffered:k=0, but it must be a whole number of at least 1; write buffered:k=1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _refused(name, value, f"a whole number of at least {least}", least)


def positive(name: str, value: object, *, instead: float) -> None:
    """``value`` must be a finite number above 0; ``instead`` is what the message proposes."""
    number(name, value, "above 0", lambda v: v > 0, instead=instead)


def number(name: str, value: object, rule: str, holds: Callable[[float], bool], *, instead: float) -> None:
    """``value`` must be a finite number for which ``holds``; ``rule`` says so in words."""
    if not _is_number(value) or not holds(value):
        raise _refused(name, value, f"a number {rule}", instead)


def flag(name: str, value: object) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false", "true")


def choice(name: str, value: object, choices: Iterable[str]) -> None:
    """``value`` must be one of the names; the error names the nearest."""
    known = tuple(choices)
    if value not in known:
        raise unknown(name, str(value), known)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refused(name: str, value: object, rule: str, instead: object) -> InputError:
    return InputError(f"{name}={value}, but it must be {rule}; write {name}={instead}.")
