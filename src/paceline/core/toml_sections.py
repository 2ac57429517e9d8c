"""TOML files that users write: sections whose lines are checked as arguments of a dataclass."""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, unknown


def text_of(path: Path) -> str:
    """Return the text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read ({error}); write the path of a TOML file.") from None


def toml(text: str) -> Mapping[str, Any]:
    """Parse TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is no TOML: {error}; write lines such as layers = 12 under [model].") from None


def section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one section of a parsed file."""
    lines = values.get(name)
    if not isinstance(lines, dict):
        raise InputError(f"there is no section [{name}]; write [{name}] and its lines under it.")
    return lines


def checked(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check a section's lines as arguments of a dataclass: each known and of its type, none missing."""
    keys = {each.name: each for each in fields(kind)}
    refuse_unknown(f"key of {section_of(where)}", values, keys)
    for name, each in keys.items():  # in the order of the fields, so that the first missing one is reported
        if each.default is MISSING and each.default_factory is MISSING and name not in values:
            raise InputError(f"{section_of(where)} has no {name}; write {name} = … under it.")
    return {name: _of_kind(value, keys[name].type, f"{where} {name}".strip()) for name, value in values.items()}


def section_of(where: str) -> str:
    """Name a section for a message; empty: the keys above all sections."""
    return f"[{where}]" if where else "the file"


def refuse_unknown(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise InputError for a name that is not known, with the nearest one that is."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def _of_kind(value: Any, kind: Any, where: str) -> Any:
    """Return the value if it has the type: a whole number is taken as a number too, nothing else is converted."""
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: 'text in "…"'}
        raise InputError(f"{where} = {value!r} is not {words[kind]}; write {where.split()[-1]} = {words[kind]}.")
    return value
