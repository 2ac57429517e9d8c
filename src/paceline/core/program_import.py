"""The import of a user's file or module for its program, while which nothing may be trained."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.core.errors import InputError


@dataclass
class Importing:
    """An import that is under way."""

    source: str
    """The file, or the module's name."""
    refused: list[InputError] = field(default_factory=list[InputError])
    """Calls that wanted to train meanwhile."""


# The innermost import comes last: a file may load the program of another one.
_UNDER_WAY: list[Importing] = []


@contextmanager
def importing(source: str) -> Iterator[None]:
    """Refuse to train within the block; raise the refusal at its end, even if the file's own code has caught it.

    Raises:
        InputError: the file trains while it is imported.
    """
    own = Importing(source)
    _UNDER_WAY.append(own)
    try:
        yield
    except Exception:
        if not own.refused:
            raise
    finally:
        _UNDER_WAY.pop()
    if own.refused:
        raise own.refused[0]


def refuse_while_importing(call: str) -> None:
    """Raise InputError if a program's file is being imported: it would train before it has a program to give.

    Args:
        call: what it has called, ``train``.
    """
    if not _UNDER_WAY:
        return
    own = _UNDER_WAY[-1]
    frame, line = sys._getframe(1), ""
    while frame is not None:  # the line of the file itself
        if frame.f_code.co_name == "<module>" and own.source in (frame.f_code.co_filename, frame.f_globals["__name__"]):
            line = f", in line {frame.f_lineno},"
            break
        frame = frame.f_back  # type: ignore[assignment]  # None after the last
    error = InputError(
        f"{own.source} trains{line} while it is imported for its program: it calls paceline.{call}. Write\n"
        '    if __name__ == "__main__":\n'
        "before what trains, and indent that; then the file trains when it is run, and not when it is imported."
    )
    own.refused.append(error)
    raise error
