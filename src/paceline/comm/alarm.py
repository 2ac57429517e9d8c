"""Waking who sleeps, and nobody else: a bell that is rung only where somebody waits for it.

::

    who waits                                 who wakes
    looks; yields the processor; looks ...    writes what there is to see
    sets "asleep"                             fence
    fence                                     asleep?  clear it, ring the bell
    looks once more
    blocks on the bell

Between a fence and what follows it no load overtakes a store, so at least one of the two sees the other's word: either
the sleeper sees what was written, or the writer sees the sleeper. Ringing is a system call and wakes a process; looking
is a load. While there is much to do nobody sleeps, and nothing but loads and stores is needed.
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.core.types import Nanoseconds, Seconds

MOST_LOOKS = 64
"""Looks before a wait blocks, at most; with a yield in between each takes about a microsecond."""

SHORT_NS: Nanoseconds = 300_000
"""A wait that was over so soon is looked for the next time; after longer ones, less and less."""

UNBOUNDED_NS: Nanoseconds = 2**63

MOST_HELD_NS: Nanoseconds = 200_000
"""Nobody looks for longer without yielding the processor."""

DOZE_S: Seconds = 1.0
"""Nobody sleeps longer without looking: no more is lost if a ringer dies between clearing the word and ringing."""

FENCED = platform.machine() in ("x86_64", "AMD64")
"""Whether stores become visible in the order they are made in, and :func:`fence` is one. Elsewhere every ring rings."""

_barrier = threading.Lock()


def fence() -> None:
    """Let no later load overtake an earlier store: a lock is taken and released by locked instructions."""
    with _barrier:
        return


class Ringing(Protocol):
    """What wakes a sleeper: a :class:`~paceline.comm.bell.Bell`, a :class:`~paceline.comm.futex.Futex`."""

    def ring(self) -> None:
        """Wake who sleeps."""

    def clear(self) -> None:
        """Forget the rings so far."""

    def wait(self, timeout_s: Seconds) -> bool:
        """Sleep until rung; False where it was not in time."""


class Alarm:
    """A bell, and a word in shared memory that says whether its owner sleeps.

    Args:
        bell: rung to wake the owner.
        asleep: one 8-byte word, 0 at first; written by both sides.
        look_ns: how long a wait looks before it blocks, at most. Where others compute, a yield may last until their
            turn is over; who sleeps instead is run when it is woken.
    """

    def __init__(self, bell: Ringing, asleep: "memoryview[int]", look_ns: Nanoseconds = UNBOUNDED_NS) -> None:
        self.bell, self._asleep, self.look_ns = bell, asleep, look_ns
        self._looks = MOST_LOOKS
        self._began: Nanoseconds = 0
        self._hold_ns: Nanoseconds = 0

    def ring(self) -> None:
        """Wake the owner if it sleeps; what it is to see has been written before."""
        fence()
        self.wake()

    def wake(self) -> None:
        """As :meth:`ring`, by who has made a fence since the writing."""
        if self._asleep[0] or not FENCED:
            self._asleep[0] = 0
            self.bell.ring()

    def expect(self, wait_ns: Nanoseconds, worked_ns: Nanoseconds) -> None:
        """Say how long a wait lasts, and the work between two; the next :meth:`spin` holds the processor for it.

        Not for long, nor for more than a small part of the work. Who yields instead gets the processor back when all
        others have had their turn, and finds its caches filled with their data.
        """
        self._hold_ns = 2 * wait_ns if 2 * wait_ns < min(MOST_HELD_NS, worked_ns // 8) else 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """Look for a moment, if such a wait has lately been short; whether there was something to see."""
        self._began = began = time.monotonic_ns()
        while self._hold_ns and time.monotonic_ns() - began < self._hold_ns:
            if ready():
                return True
        for _ in range(self._looks):
            if ready():
                return True
            os.sched_yield()
            if time.monotonic_ns() - began > self.look_ns:
                break
        return ready()

    def sleep(self, ready: Callable[[], bool], block: Callable[[Seconds], object], timeout_s: Seconds) -> None:
        """Block until rung or, without blocking, until there is something to see; for the owner alone.

        Args:
            ready: whether there is something to see.
            block: waits for the bell, and whatever else may wake the owner, for so long at the most.
            timeout_s: the longest sleep.
        """
        self._asleep[0] = 1
        fence()
        if not ready():
            block(min(timeout_s, DOZE_S))
            self.bell.clear()
        self._asleep[0] = 0
        short = time.monotonic_ns() - self._began < SHORT_NS
        self._looks = MOST_LOOKS if short else self._looks // 2
