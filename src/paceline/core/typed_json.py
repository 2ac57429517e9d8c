"""Dataclasses and NamedTuples as JSON, read back by the types of their fields.

What is read is checked: each object has exactly the fields of its class, each value the type of its field, and whole
numbers are counts. Nothing is constructed but the classes that the hints name.
"""

import dataclasses
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.core.errors import InputError

# Bound on whole numbers: a tensor has fewer elements, a run fewer steps.
_MOST = 1 << 62


def to_json(value: Any) -> Any:
    """Return a value as JSON: dataclasses and NamedTuples as objects of their fields.

    >>> from paceline.core.records import ReplicaExit
    >>> to_json({"left": (ReplicaExit(1, "killed by SIGKILL", 2.5),)})
    {'left': [{'replica': 1, 'reason': 'killed by SIGKILL', 'time_s': 2.5}]}
    """
    names = field_names(type(value))
    if names is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, list | tuple) else value


def of_json(hint: Any, value: Any, what: str) -> Any:
    """Return the value of a type whose :func:`to_json` this is.

    Args:
        hint: the type.
        value: JSON.
        what: it is, for the message: "the state of the run".

    Raises:
        InputError: it is none.

    >>> of_json(tuple[int, ...] | None, [1, "2"], "the list")
    Traceback (most recent call last):
    paceline.core.errors.InputError: the list can't be read: ValueError("'2' is no int")
    """
    try:
        return _read(hint, value)
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise InputError(f"{what} can't be read: {error!r}") from error


def field_names(cls: Any) -> tuple[str, ...] | None:
    """Return the names with which a dataclass or a NamedTuple is constructed; None: it is another class."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)
    return getattr(cls, "_fields", None) if isinstance(cls, type) and issubclass(cls, tuple) else None


def _read(hint: Any, value: Any) -> Any:
    kind, args = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return value
    if kind in (Union, types.UnionType):
        return None if value is None and types.NoneType in args else _read(args[0], value)
    if kind is Literal:
        if value not in args:
            raise ValueError(f"{value!r} is none of {args}")
        return value
    if kind in (tuple, Sequence):
        if kind is tuple and args[1:] != (...,) and len(value) != len(args):
            raise ValueError(f"{value} should have {len(args)} elements")
        hints = args if kind is tuple and args[1:] != (...,) else [args[0]] * len(value)
        return tuple(_read(each, element) for each, element in zip(hints, _of(list, value), strict=True))
    if kind in (Mapping, dict, Counter):
        # The keys of a JSON object are texts.
        key, of = (args[0], int) if kind is Counter else args
        items = {int(k) if key is int else k: _read(of, each) for k, each in _of(dict, value).items()}
        return Counter(items) if kind is Counter else items
    if (names := field_names(kind)) is not None:
        if set(_of(dict, value)) != set(names):
            raise ValueError(f"{kind.__name__} has {', '.join(names)}, not {', '.join(value)}")
        return kind(**{name: _read(_hints(kind)[name], value[name]) for name in names})
    return _scalar(kind, value)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return value
    if kind is int and not 0 <= _of(int, value) < _MOST:
        raise ValueError(f"{value} is no count")
    return _of(kind, value)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:100]!r} is no {kind.__name__}")
    return value
