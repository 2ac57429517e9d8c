"""States of policies and their decisions as JSON, for checkpoints.

A state is made of numbers, texts, tuples, frozensets, mappings, NamedTuples and dataclasses. Classes are written by
name, and looked up only among those that are defined beside the policy, its threshold or Paceline's own policies; so
reading a state constructs nothing else.
"""

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping
from types import NoneType
from typing import Any

from paceline.aggregation import text_of
from paceline.aggregation.base import Aggregation
from paceline.core.errors import InputError


def encode(state: Any, policy: Aggregation[Any] | None = None) -> Any:
    """Return a state as JSON.

    Args:
        state: of a policy.
        policy: whose state it is, to check that its classes are found again; None: they are Paceline's own.

    Raises:
        InputError: it holds something that JSON can't say exactly, a tensor for instance, or that :func:`decode` would
            not find.

    >>> encode((1, frozenset({2, 0})))
    {'tuple': [1, {'set': [0, 2]}]}
    """
    return _encode(state, None if policy is None else _classes(policy))


def _encode(state: Any, classes: Mapping[str, type] | None) -> Any:
    if state is None or isinstance(state, (bool, str)) or type(state) is int:
        return state
    if isinstance(state, float):
        return state if math.isfinite(state) else {"float": repr(state)}
    if _is_record(cls := type(state)):
        if classes is not None and classes.get(cls.__name__) is not cls:
            raise InputError(
                f"a policy's state has a {cls.__qualname__}, which a resumed run would not find by the name "
                f"{cls.__name__}; define the class at the top level of the policy's module, or leave checkpoint= out"
            )
        fields = {name: _encode(getattr(state, name), classes) for name in _field_names(cls)}
        return {"type": cls.__name__, "fields": fields}
    if isinstance(state, tuple):
        return {"tuple": [_encode(each, classes) for each in state]}
    if isinstance(state, frozenset):
        return {"set": [_encode(each, classes) for each in sorted(state, key=repr)]}
    if isinstance(state, Mapping):
        return {"map": [[_encode(key, classes), _encode(value, classes)] for key, value in state.items()]}
    raise InputError(
        f"a policy's state has a {type(state).__name__}, which a checkpoint can't hold; make it of numbers, texts, "
        "tuples, frozensets, mappings, NamedTuples and frozen dataclasses, or leave checkpoint= out"
    )


def kind(policy: Any) -> str:
    """Return what two policies have in common if one can go on with the state of the other: all but numbers.

    >>> from paceline.aggregation import Buffered
    >>> kind(Buffered(k=8))
    "Buffered(combine='mean',hold=True,cancel=False)"
    """
    if dataclasses.is_dataclass(policy):
        fields = ((field.name, getattr(policy, field.name)) for field in dataclasses.fields(policy) if field.init)
        numbers = (int, float, NoneType)  # None: a number that is chosen by itself
        parts = (f"{name}={kind(v)}" for name, v in fields if isinstance(v, bool) or not isinstance(v, numbers))
        return f"{type(policy).__name__}({','.join(parts)})"
    return repr(policy) if isinstance(policy, bool | str) else type(policy).__name__


def decode(value: Any, policy: Aggregation[Any]) -> Any:
    """Return the state whose :func:`encode` a value is.

    Raises:
        InputError: it is no state of this policy.
    """
    try:
        return _decode(value, _classes(policy))
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"this is no state of {text_of(policy)}: {error!r}") from error


def _decode(value: Any, classes: Mapping[str, type]) -> Any:
    if not isinstance(value, Mapping):
        if isinstance(value, list):
            raise TypeError("a list")
        return value
    if "type" in value:
        cls, fields = classes[value["type"]], value["fields"]
        if set(fields) != set(_field_names(cls)):
            raise ValueError(
                f"the fields of {cls.__name__} are {', '.join(_field_names(cls))}, not {', '.join(fields)}"
            )
        return cls(**{name: _decode(each, classes) for name, each in fields.items()})
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "map":
        return {_decode(key, classes): _decode(each, classes) for key, each in inner}
    return {"tuple": tuple, "set": frozenset}[kind](_decode(each, classes) for each in inner)


def _classes(policy: Aggregation[Any]) -> dict[str, type]:
    """Return the classes that a state of this policy may be made of, by name."""
    shipped = [name for name in sys.modules if name.startswith(f"{__package__}.")]
    modules = dict.fromkeys([*shipped, *reversed(_modules(policy))])  # the policy's own are looked up first
    found = (value for name in modules for value in vars(sys.modules[name]).values())
    return {value.__name__: value for value in found if isinstance(value, type) and _is_record(value)}


def _modules(value: Any) -> list[str]:
    """Return the modules of a value's class and its bases, and those of values in its fields that are dataclasses."""
    own = [cls.__module__ for cls in inspect.getmro(type(value)) if cls is not object]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    inner = (getattr(value, field.name) for field in fields)
    return [*own, *(name for each in inner if dataclasses.is_dataclass(each) for name in _modules(each))]


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def _field_names(cls: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)
    names: tuple[str, ...] = cls._fields
    return names
