"""Every policy over every form of replica on an accelerator, in one process or in worker processes."""

from collections.abc import Mapping

from paceline.engine.local.engine import LocalEngine
from tests.accelerator.target import Target
from tests.combinations import cells, tried


def virtual(on: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return policy, form, engine and, where it was refused, the reason of each cell in virtual time."""
    return [(*cell, tried(cell, "virtual", Target(**on))) for cell in cells("virtual")]


def local(on: Mapping[str, str]) -> list[tuple[str, ...]]:
    """As :func:`virtual`, in worker processes."""
    with LocalEngine() as engine:
        return [(*cell, tried(cell, engine, Target(**on))) for cell in cells("local")]
