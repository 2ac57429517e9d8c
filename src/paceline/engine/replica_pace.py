"""Which replicas are silent and which are slow, by the Δs that arrive.

Progress alone shows that a worker lives: a process that is stopped, or whose interpreter is held by an extension, may
keep a helper thread, a socket or a heartbeat alive.

::

    replica 0   |--step--|--step--|--step--|--step--|
    replica 1   |--step--|--step--|........................   silent: longer than suspect_after_s, and than its steps
    replica 2   |----------step----------|----------step---   a straggler: steps of twice the others' median
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Set

from paceline.core.types import Clock, ReplicaId, Seconds

# Steps of a replica that are remembered, and how many it takes until it may be called slow.
REMEMBERED, ENOUGH = 20, 5

# A replica is silent after so many times its longest remembered step, at least.
SILENT_STEPS = 3.0

# A straggler's median step, compared with the median of the others'.
SLOW = 2.0

# A longer time between two looks is this process's own silence, for which no replica is to blame.
OWN_SILENCE_S: Seconds = 0.5


class ReplicaPace:
    """Times of the steps of a run's replicas.

    Args:
        replicas: P.
        suspect_after_s: time after which a replica that computes is silent, at least.
        timeout_s: the same as long as nobody has made a step.
    """

    def __init__(self, replicas: int, suspect_after_s: Seconds, timeout_s: Seconds) -> None:
        self._suspect_after_s, self._timeout_s = suspect_after_s, timeout_s
        self._since: dict[ReplicaId, Seconds] = {}
        """Beginning of the step of each replica that computes."""
        self._steps = [deque[Seconds](maxlen=REMEMBERED) for _ in range(replicas)]
        self._looked: Seconds | None = None
        self._remarks: dict[tuple[str, ReplicaId], str] = {}

    def arrived(self, replica: ReplicaId, now: Seconds) -> None:
        """Note the end of a replica's step."""
        began = self._since.pop(replica, None)
        if began is not None:
            self._steps[replica].append(now - began)

    def handled(self, computing: Set[ReplicaId], now: Seconds) -> None:
        """Note which replicas compute after a decision."""
        for replica in computing - self._since.keys():
            self._since[replica] = now

    def left(self, replica: ReplicaId) -> None:
        """Forget a replica that computes no more, or has to start first."""
        self._steps[replica].clear()
        self._since.pop(replica, None)

    def silent(self, now: Seconds, excused_until: Callable[[ReplicaId], Seconds]) -> dict[ReplicaId, Seconds]:
        """Return for how long silent replicas have been so.

        Args:
            now: training time.
            excused_until: training time up to which a replica has announced to be silent.
        """
        own = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if own > OWN_SILENCE_S:
            self._since = {replica: since + own for replica, since in self._since.items()}
        silences = {r: now - max(since, excused_until(r)) for r, since in self._since.items()}
        return {replica: silence for replica, silence in silences.items() if silence > self._bound(replica)}

    def stragglers(self) -> Mapping[ReplicaId, float]:
        """Return how many times the others' median step a slow replica's takes."""
        medians = {r: statistics.median(steps) for r, steps in enumerate(self._steps) if len(steps) >= ENOUGH}
        found: dict[ReplicaId, float] = {}
        for replica, median in medians.items():
            others = [each for other, each in medians.items() if other != replica]
            if others and median > SLOW * (usual := statistics.median(others)) > 0:
                found[replica] = median / usual
        return found

    def _bound(self, replica: ReplicaId) -> Seconds:
        steps = self._steps[replica] or [step for each in self._steps for step in each]
        if not steps:
            return max(self._timeout_s, self._suspect_after_s)
        return max(self._suspect_after_s, SILENT_STEPS * max(steps))

    # -------------------------------------------------------------------------------------------------------- in words

    def look(
        self,
        now: Seconds,
        excused_until: Callable[[ReplicaId], Seconds],
        step: Callable[[ReplicaId], Clock],
        unread: Callable[[ReplicaId], bool],
    ) -> tuple[dict[ReplicaId, Seconds], tuple[str, ...]]:
        """Return for how long silent replicas have been so, and sentences about them and the slow ones.

        The newest sentence of each kind about each replica is kept for the summary.

        Args:
            now: training time.
            excused_until: as for :meth:`silent`.
            step: number of the step that a replica is at.
            unread: returns whether a replica's Δ is there, and this process has not taken it.
        """
        silent = {r: silence_s for r, silence_s in self.silent(now, excused_until).items() if not unread(r)}
        remarks: list[str] = []
        for replica, silence_s in silent.items():
            remarks.append(f"replica {replica} silent for {silence_s:.1f} s at its step {step(replica)}")
            self._remarks["silent", replica] = f"{remarks[-1]}, until {now:.1f} s"
        for replica, times in self.stragglers().items():
            remarks.append(f"replica {replica} takes {times:.1f} times as long for a step as the others")
            self._remarks["stragglers", replica] = f"{remarks[-1]}, at {now:.1f} s"
        return silent, tuple(remarks)

    def notes(self) -> dict[str, str]:
        """Return the remarks of each kind, for the summary."""
        kinds = dict.fromkeys(kind for kind, _ in self._remarks)
        return {kind: "; ".join(text for (each, _), text in self._remarks.items() if each == kind) for kind in kinds}


class ExchangePace:
    """Measures how far exchanges are apart, to tell a slow rank from one that is cut off or stopped.

    Args:
        suspect_after_s: silence after which a rank is suspected, at least.
    """

    def __init__(self, suspect_after_s: Seconds) -> None:
        self._suspect_after_s = suspect_after_s
        self._intervals = deque[Seconds](maxlen=REMEMBERED)
        self._last_s = -math.inf
        self._generation = 0

    def silence_s(self, generation: int, *, joined: bool) -> Seconds | None:
        """Return how long a rank may be silent; None: as long as the timeout, for some have made no step yet.

        Args:
            generation: of the process group; between two of them more time passes than between two exchanges.
            joined: whether ranks have joined in it.
        """
        if generation != self._generation:
            self._generation, self._last_s = generation, -math.inf
            if joined:
                self._intervals.clear()
        return max(self._suspect_after_s, SILENT_STEPS * max(self._intervals)) if self._intervals else None

    def complete(self) -> None:
        """Note that an exchange is complete."""
        now = time.monotonic()
        if self._last_s > -math.inf:
            self._intervals.append(now - self._last_s)
        self._last_s = now
