"""The server as a replica's process sees it, and how a forward pass learns that its attempt is called off."""

from typing import Protocol

from torch import nn
from torch.jit import ScriptModule

from paceline.core.types import Clock, Seconds
from paceline.replica.base import Measured
from paceline.replica.state import State
from paceline.step import Server

LOOKS = 4
"""How often a forward pass looks whether it has been called off, at least; a hook costs some microseconds."""


class Cancelled(Exception):  # noqa: N818 (not an error)
    """The attempt under way was called off."""


class Station(Server[State, Measured], Protocol):
    """A and F, as one replica sees them, whatever carries the bytes."""

    attempt: Clock
    """Which Δ this replica is at."""

    def going(self) -> bool:
        """Wait for what follows the last report; whether it is to go on."""

    def called_off(self) -> bool:
        """Whether the attempt under way was cancelled, or the run has ended."""

    def confirm(self) -> int:
        """The attempt that was called off has stopped; how many micro-steps after this one it leaves undone."""

    def pause(self, seconds: Seconds) -> None:
        """Be slow for so long, or until called off."""


def watch(module: nn.Module, station: Station) -> None:
    """Let a forward pass end between two layers when its attempt is called off."""

    def look(*_: object) -> None:
        if station.called_off():
            raise Cancelled

    # Scripted layers take no hooks.
    layers = [m for m in module.modules() if next(m.children(), None) is None and not isinstance(m, ScriptModule)]
    for layer in layers[:: max(1, len(layers) // LOOKS)]:
        layer.register_forward_pre_hook(look)
