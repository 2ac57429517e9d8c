"""Where A lives: engines that run any replica under any policy, one folder each.

Importing this package imports no engine: :data:`ENGINES` finds their folders, and imports one when it is opened.
"""

from paceline.core.errors import unknown
from paceline.core.registry import Family, modules_in_folders

# Every engine by name: each folder that has an engine.py.
ENGINES = Family("engine", values=False, modules=modules_in_folders(__name__, "engine"))


def split_name(name: str) -> tuple[str, str | None]:
    """Return the kind of engine that a name is of, and the address after its colon; None: it has none.

    Raises:
        InputError: there is no such engine.

    >>> split_name("ray:auto"), split_name("local")
    (('ray', 'auto'), ('local', None))
    """
    kind, colon, address = name.partition(":")
    if kind not in ENGINES.names():
        raise unknown("engine", name, ENGINES.names())
    return kind, address if colon else None
