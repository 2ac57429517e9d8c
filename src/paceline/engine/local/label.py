"""What a worker of a replica of several is called, and how it ends."""

from paceline.core.mesh import Place

QUIET = 3
"""The exit code of who ends because another one of its replica has."""


def label(place: Place) -> str:
    """A worker of a replica of several, in words that follow "replica".

    >>> label(Place(1, 0, 2))
    '1 (stage 0, shard 2)'
    """
    return f"{place.replica} (stage {place.stage}, shard {place.shard})"
