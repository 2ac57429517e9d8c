"""Profiles as JSON files; those of another machine are not mistaken for this one's."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from paceline.core.errors import InputError
from paceline.plan.host.profile import Machine, Profile
from paceline.trace.files import replacing

FORMAT = 2
"""Counted up where older files can't be read any more."""


def this_machine() -> Machine:
    """The one that this process runs on."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(_processor(), len(os.sched_getaffinity(0)), memory, version("torch"))


def save(profile: Profile, path: str | Path) -> None:
    """Write a profile; the file is whole at every moment.

    Raises:
        InputError: it can't be written there.
    """
    text = json.dumps({"format": FORMAT, **asdict(profile)}, indent=1, ensure_ascii=False)
    try:
        with replacing(path) as file:
            file.write(text + "\n")
    except OSError as error:
        raise InputError(f"{path} can't be written: {error}; write a path below a folder of yours") from error


def load(path: str | Path, *, elsewhere: bool = False) -> Profile:
    """Read a profile.

    Args:
        path: of the file.
        elsewhere: whether one of another machine will do: its provenance then says so.

    Raises:
        InputError: there is none, it is damaged, or it is another machine's.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        profile: Profile = _made(Profile, value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is no profile: {error}; write one with paceline.plan(..., profile=path)") from error
    return _of_here(profile, path, elsewhere=elsewhere)


def _of_here(profile: Profile, path: str | Path, *, elsewhere: bool) -> Profile:
    there, here = profile.machine, this_machine()
    if there == here:
        return profile
    differs = ", ".join(
        f"{each.name}={getattr(there, each.name)!r} (here {getattr(here, each.name)!r})"
        for each in fields(Machine)
        if getattr(there, each.name) != getattr(here, each.name)
    )
    if not elsewhere:
        raise InputError(f"{path} was measured on another machine, {differs}; measure anew: write another file")
    marked = {name: f"{text}; on another machine: {differs}" for name, text in profile.provenance.items()}
    return _made(Profile, asdict(profile) | {"provenance": marked})  # type: ignore[no-any-return]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _made(kind: Any, value: Any) -> Any:
    """A value of a type's, from plain ones."""
    if is_dataclass(kind):
        hints, make = get_type_hints(kind), cast(Any, kind)
        return make(**{each.name: _made(hints[each.name], value[each.name]) for each in fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, Sequence):
        return tuple(_made(inner[0], each) for each in value)
    if origin is Mapping:
        return {str(key): _made(inner[1], each) for key, each in value.items()}
    if origin in (Union, UnionType):
        return None if value is None else _made(inner[0], value)
    return _plain(kind, value, origin, inner)


def _plain(kind: Any, value: Any, origin: Any, inner: Sequence[Any]) -> Any:
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{value!r} is none of {', '.join(map(str, inner))}")
        return value
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
