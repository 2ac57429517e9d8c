"""Policies as text: one word for a shell, a table or a file.

    value  = name [":" option ("," option)*]            smooth-switch:every=500
    option = key "=" (number | "true" | "false" | "none" | word | number "/lr" | value | "(" value ")") | name

A value with options of its own stands in parentheses: ``local-steps:period=16,over=(buffered:k=8)``. A name alone
stands for the option that takes it: ``smooth-switch:adaptive`` is ``smooth-switch:threshold=adaptive``. The canonical
text has only what differs from the defaults, in the constructor's order. What only Python can say, a function as a
threshold, prints as ``<its name>`` and is refused when it is read.
"""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from paceline.aggregation.base import Aggregation
from paceline.aggregation.registry import Entry, Kind, Option, entry_of, kind_of
from paceline.aggregation.thresholds import Function, PerLearningRate, plain
from paceline.core.errors import InputError, unknown

_OPENING, _CLOSING = "([", ")]"


def parse(text: str) -> Aggregation[Any]:
    """The policy that a text says.

    Raises:
        InputError: an unknown policy or option, with the nearest name; a value of the wrong type or out of its range.

    >>> parse("smooth-switch:every=5/lr,combine=sum")
    SmoothSwitch(every=PerLearningRate(multiple=5.0), threshold=None, combine='sum', hold=True, count='received')
    """
    kind = kind_of(Aggregation)
    assert kind is not None
    policy: Aggregation[Any] = _parse(kind, text)
    return policy


def text_of(value: object) -> str:
    """The canonical text of a policy, a threshold or an outer optimizer.

    >>> text_of(parse("buffered:hold=true,k=4"))
    'buffered:k=4'
    """
    entry = entry_of(value)
    if entry is None:
        function = value.function if isinstance(value, Function) else type(value)
        return f"<{getattr(function, '__name__', type(function).__name__).strip('<>')}>"
    kept = {name: getattr(value, name) for name in entry.options()}
    said = [f"{name}={show(kept[name])}" for name, o in entry.options().items() if kept[name] != o.default]
    return f"{entry.name}:{','.join(said)}" if said else entry.name


def show(value: object) -> str:
    """The text of one option's value.

    >>> show(0.5), show(500.0), show(True), show((3, 1)), show(None)
    ('0.5', '500', 'true', '[3,1]', 'none')
    """
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{','.join(map(show, value))}]"
        case int() | float():
            return plain(value)
        case str() | PerLearningRate():
            return str(value)
    nested = text_of(value)
    return f"({nested})" if ":" in nested else nested


def read(name: str, hint: Any, text: str) -> Any:
    """The value of one option.

    Args:
        name: of the option, for messages.
        hint: its type: bool, int, float, tuple[int, ...], tuple[str, ...], a Literal, a registered kind, None, or a
            union of these.
        text: what stands after the ``=``.
    """
    members = list(alternatives(hint))
    for alternative in members:
        reader = _READERS.get(alternative)
        try:
            if get_origin(alternative) is Literal and text in get_args(alternative):
                return text
            if reader is not None:
                return reader(text)
        except InputError:
            raise
        except ValueError:
            continue
    kind = next((k for a in members if (k := kind_of(a))), None)
    if kind is not None:
        return _parse(kind, _unwrapped(text))
    raise _misfit(name, members, text)


def split(text: str, at: str) -> list[str]:
    """``text`` cut at each of the characters ``at`` that is outside all parentheses and brackets.

    >>> split("a=1,b=(c:d=2,e=3)", at=",")
    ['a=1', 'b=(c:d=2,e=3)']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            break
        if depth == 0 and character in at:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth != 0:
        raise InputError(f"the parentheses in {text!r} don't match; write over=(buffered:k=8), say.")
    return pieces


def _parse(kind: Kind, text: str) -> Any:
    if text.startswith("<"):
        raise InputError(f"{text} has no text form; build the {kind.word} in Python, or give its class @register(…).")
    name, colon, rest = text.partition(":")
    entry = kind.entry(name)
    options = entry.options()
    values: dict[str, Any] = {}
    for key, value in _pairs(name, options, rest) if colon else ():
        if key in values:
            raise InputError(f"{text!r} says {key} twice; write {key}={value} once.")
        values[key] = read(f"{name}:{key}", options[key].hint, value)
    _refuse_missing(entry, values)
    return entry.cls(**entry.fixed, **values)


def _pairs(name: str, options: Mapping[str, Option], text: str) -> Iterator[tuple[str, str]]:
    for pair in split(text, at=","):
        key, equals, value = pair.partition("=")
        if not equals and (taker := _taker(options, key)):
            key, equals, value = taker, "=", key
        if key not in options and key:
            raise unknown(f"option of {name}", key, options)
        if not equals or not value:
            raise InputError(f"{pair!r} is no option of {name}; write {name}:option=value, or {name} alone.")
        yield key, value


def _taker(options: Mapping[str, Option], name: str) -> str | None:
    """The option that takes values of a registered name."""
    for key, option in options.items():
        for alternative in alternatives(option.hint):
            kind = kind_of(alternative)
            if kind is not None and name in kind.entries:
                return key
    return None


def _refuse_missing(entry: Entry, values: Mapping[str, Any]) -> None:
    for key, option in entry.options().items():
        if option.default is Parameter.empty and key not in values:
            raise InputError(f"{entry.name} has no default for {key}; write {entry.name}:{key}=… .")


def alternatives(hint: Any) -> Iterator[Any]:
    """The members of a union, or the one type that ``hint`` is."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from alternatives(member)
    else:
        yield hint


def _unwrapped(text: str) -> str:
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _misfit(name: str, members: list[Any], text: str) -> InputError:
    choices = [c for a in members if get_origin(a) is Literal for c in get_args(a)]
    if choices:
        return unknown(name, text, choices)
    wanted = " or ".join(_WORDS[a] for a in members if a in _WORDS)
    return InputError(f"{name}={text}, but it must be {wanted or 'said in Python'}; write {name}=<{wanted}>.")


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _none(text: str) -> None:
    if text != "none":
        raise ValueError(text)


def _integers(text: str) -> tuple[int, ...]:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(text)
    return tuple(int(piece) for piece in text[1:-1].split(","))


def _names(text: str) -> tuple[str, ...]:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return tuple(filter(None, inside.split(",")))


_READERS: Mapping[Any, Callable[[str], Any]] = {
    bool: _bool,
    int: int,
    float: float,
    NoneType: _none,
    PerLearningRate: PerLearningRate.parse,
    tuple[int, ...]: _integers,
    tuple[str, ...]: _names,
}

_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    NoneType: "none",
    PerLearningRate: "a number before /lr",
    tuple[int, ...]: "a list of whole numbers",
}
