"""Time to capture, cut and check a model before training, which may take longer than any wait in it."""

import contextlib
import time
from collections.abc import Iterator

from paceline.core.types import Seconds
from paceline.engine.team.team import Team

PREPARATION_S: Seconds = 1800.0
"""How long that may take before it counts as a hang; a rank that dies meanwhile is missed at once."""


@contextlib.contextmanager
def excused(team: Team) -> Iterator[None]:
    """While it is entered, nobody takes this rank's silence for a hang."""
    notices, ahead_ns = team.notices, team.peers.ahead_ns
    if notices is not None:
        notices.excuse(time.monotonic_ns() + ahead_ns + int(PREPARATION_S * 1e9))
    yield
    if notices is not None:
        notices.excuse(0)
