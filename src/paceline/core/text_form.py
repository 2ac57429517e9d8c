"""Registered values as text: one word for a shell, a table or a file.

    value  = name [":" option ("," option)*]            smooth-switch:every=500
    option = key "=" (number | "true" | "false" | "none" | word | number "/lr" | value | "(" value ")") | name

A value with options of its own stands in parentheses: ``local-steps:period=16,over=(buffered:k=8)``. A name alone
stands for the option that takes it: ``smooth-switch:adaptive`` is ``smooth-switch:threshold=adaptive``. The canonical
text has only what differs from the defaults, in the constructor's order. What only Python can say, a function as a
threshold, prints as ``<its name>`` and is refused when it is read.

A type of options that is none of Python's own, as ``5/lr`` above, joins with :func:`option_type`.
"""

from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from paceline.core.errors import InputError, unknown
from paceline.core.registry import Family, TextOption, entry_of, family_of

T = TypeVar("T")
Value = TypeVar("Value")
Given = TypeVar("Given")


def text_of(value: object) -> str:
    """Return the canonical text of a registered value; ``<name>`` if its class has none.

    >>> from paceline.aggregation import Buffered
    >>> text_of(Buffered(k=4, hold=True))
    'buffered:k=4'
    """
    entry = entry_of(value)
    if entry is None:
        return f"<{getattr(value, '__name__', type(value).__name__)}>"
    changed = [
        f"{name}={format_option(getattr(value, name))}"
        for name, option in entry.options().items()
        if getattr(value, name) != option.default
    ]
    return f"{entry.name}:{','.join(changed)}" if changed else entry.name


def format_option(value: object) -> str:
    """Return the text of one option's value.

    >>> format_option(0.5), format_option(500.0), format_option(True), format_option((3, 1)), format_option(None)
    ('0.5', '500', 'true', '[3,1]', 'none')
    """
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{','.join(map(format_option, value))}]"
        case int() | float():
            return format_number(value)
        case str():
            return value
    if type(value) in _OPTION_TYPES:
        return str(value)
    nested = text_of(value)
    return f"({nested})" if ":" in nested else nested


def format_number(number: float) -> str:
    """Return a number as a person writes it: 500 rather than 500.0.

    >>> format_number(500.0), format_number(0.05), format_number(1e20)
    ('500', '0.05', '1e+20')
    """
    return str(int(number)) if number == number // 1 and abs(number) < 1e15 else repr(number)


def parse_value(family: Family, text: str) -> Any:
    """Return the value of a family that a text says.

    Raises:
        InputError: an unknown name or option, with the nearest one; a value of the wrong type or out of its range.
    """
    if text.startswith("<"):
        raise InputError(f"{text} has no text form; build the {family.word} in Python, or give its class @register(…).")
    name, colon, rest = text.partition(":")
    entry = family.entry(name)
    options = entry.options()
    values: dict[str, Any] = {}
    for key, value in _parse_pairs(name, options, rest) if colon else ():
        if key in values:
            raise InputError(f"{text!r} says {key} twice; write {key}={value} once.")
        values[key] = parse_option(f"{name}:{key}", options[key].hint, value)
    for key, option in options.items():
        if option.default is Parameter.empty and key not in values:
            raise InputError(f"{name} has no default for {key}; write {name}:{key}=… .")
    return entry.cls(**entry.fixed, **values)


def _parse_pairs(name: str, options: Mapping[str, TextOption], text: str) -> Iterator[tuple[str, str]]:
    for pair in split_outside_brackets(text, at=","):
        key, equals, value = pair.partition("=")
        if not equals:  # a name alone stands for the first option whose values have that name
            for candidate, option in options.items():
                families = filter(None, map(family_of, alternatives(option.hint)))
                if any(key in family.entries for family in families):
                    key, equals, value = candidate, "=", key
                    break
        if key not in options and key:
            raise unknown(f"option of {name}", key, options)
        if not equals or not value:
            raise InputError(f"{pair!r} is no option of {name}; write {name}:option=value, or {name} alone.")
        yield key, value


def parse_option(name: str, hint: Any, text: str) -> Any:
    """Return the value of one option.

    Args:
        name: of the option, for messages.
        hint: its type: bool, int, float, str, tuple[int, ...], tuple[str, ...], a Literal, a registered family's base,
            None, an :func:`option_type`, or a union of these.
        text: what stands after the ``=``.
    """
    members = list(alternatives(hint))
    for alternative in members:
        if get_origin(alternative) is Literal and text in get_args(alternative):
            return text
        if alternative in _OPTION_TYPES:
            try:
                return _OPTION_TYPES[alternative][0](text)
            except InputError:
                raise
            except (KeyError, ValueError):
                continue
    family = next(filter(None, map(family_of, members)), None)
    if family is not None:
        return parse_value(family, text[1:-1] if text.startswith("(") and text.endswith(")") else text)
    choices = [choice for a in members if get_origin(a) is Literal for choice in get_args(a)]
    if choices:
        choices += ["true", "false"] if bool in members else []
        raise unknown(name, text, choices)
    expected = " or ".join(word for a in members if a in _OPTION_TYPES and (word := _OPTION_TYPES[a][1]))
    if not expected:
        kind = getattr(hint, "__name__", hint)
        raise InputError(
            f"{name}={text}: values of its type, {kind}, have no text; build the object in Python, as in "
            "Strategy(aggregation=MyPolicy(…)), or leave it out."
        )
    raise InputError(f"{name}={text}, but it must be {expected}; write {name}=<{expected}>.")


def alternatives(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the one type that ``hint`` is."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from alternatives(member)
    else:
        yield hint


def split_outside_brackets(text: str, at: str) -> list[str]:
    """Split ``text`` at each of the characters ``at`` that is outside all parentheses and brackets.

    >>> split_outside_brackets("a=1,b=(c:d=2,e=3)", at=",")
    ['a=1', 'b=(c:d=2,e=3)']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth < 0:
            break
        if depth == 0 and character in at:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth != 0:
        raise InputError(
            f"a parenthesis or bracket in {text!r} is not closed, or not opened; write both or neither: "
            "over=(buffered:k=8), every=5."
        )
    return pieces


def _parse_integers(text: str) -> tuple[int, ...]:
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(text)
    return tuple(int(piece) for piece in text[1:-1].split(","))


def _parse_names(text: str) -> tuple[str, ...]:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return tuple(filter(None, inside.split(",")))


# The types that an option may have: what reads one (KeyError or ValueError: it can't), and the words for messages.
_OPTION_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "a text"),
    NoneType: ({"none": None}.__getitem__, "none"),
    tuple[int, ...]: (_parse_integers, "a list of whole numbers"),
    tuple[str, ...]: (_parse_names, ""),
}


def option_type(words: str) -> Callable[[type[T]], type[T]]:
    """Let options have values of a class, whose ``parse`` undoes ``str`` and raises ValueError for any other text.

    Args:
        words: for messages: "a number before /lr".
    """

    def decorate(cls: type[T]) -> type[T]:
        _OPTION_TYPES[cls] = (cls.parse, words)  # type: ignore[attr-defined]
        return cls

    return decorate


class ParsedField(Generic[Value, Given]):
    """A field of a dataclass that takes a value or its text, and always reads as the value.

    Args:
        default: the default value.
        parsed: function that makes a value of all that the field takes; it raises InputError for anything else.
    """

    def __init__(self, default: Value, parsed: Callable[[Given], Value]) -> None:
        self.default, self.parsed = default, parsed

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: object, kind: type) -> Value:
        value: Value = self.default if owner is None else owner.__dict__[self.name]
        return value

    def __set__(self, owner: object, value: Given) -> None:
        owner.__dict__[self.name] = self.parsed(value)
